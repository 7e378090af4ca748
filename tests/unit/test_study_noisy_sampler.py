"""The study of a noisy sampler: its noise is reproducible and nothing but noise, its table says what the runs' files say."""

import importlib
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.config.algorithm import Denominator, RatioLevel, SequenceCorrection, TokenCorrection
from mcore_rl.evaluate import EvalResult
from mcore_rl.types import TensorMeta

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture(scope="module")
def load():
    """A module of tools/, which is no package: the scripts there find each other by their folder."""
    sys.path.insert(0, str(TOOLS))
    yield importlib.import_module
    sys.path.remove(str(TOOLS))


class Source:
    """A WeightSource of three tensors; this rank holds the first two."""

    def __init__(self, version=0):
        generator = torch.Generator().manual_seed(7)
        self.version = version
        self.tensors = {
            "model.embed_tokens.weight": torch.randn(40, 30, generator=generator),
            "model.layers.0.mlp.gate.weight": torch.randn(8, 50, generator=generator).to(torch.bfloat16),
            "model.norm.weight": torch.randn(30, generator=generator),
        }

    def metadata(self):
        return tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items())

    def held_names(self):
        return frozenset(list(self.tensors)[:2])

    def bucket(self, names):
        return ((name, self.tensors[name]) for name in names if name in self.held_names())

    def __iter__(self):
        return iter(self.tensors.items())


def noisy(load, source, *, seed=3, std=0.1):
    module = load("study_noisy_weights")
    return module.NoisyWeights(source, module.Noise(seed, std))


def same(left, right):
    return all(torch.equal(left[name], right[name]) for name in {*left, *right})


def test_noise_keeps_names_order_shapes_and_dtypes(load):
    source = Source(version=5)
    found = noisy(load, source)
    assert (found.version, found.metadata(), found.held_names()) == (5, source.metadata(), source.held_names())
    assert tuple(TensorMeta(name, t.dtype, tuple(t.shape)) for name, t in found) == source.metadata()
    names = list(source.tensors)[:2][::-1]
    assert [name for name, _ in found.bucket([*names, "model.norm.weight"])] == names


def test_noise_is_a_function_of_seed_and_name(load):
    first = dict(noisy(load, Source(version=2)))
    assert same(first, dict(noisy(load, Source(version=2))))
    names = sorted(Source().held_names())
    assert same({name: first[name] for name in names}, dict(noisy(load, Source(version=2)).bucket(names)))
    assert same(first, dict(noisy(load, Source(version=3))))
    moved = dict(noisy(load, Source(version=2), seed=4))
    assert not any(torch.equal(first[name], moved[name]) for name in names)
    assert torch.equal(first["model.norm.weight"], moved["model.norm.weight"])


def test_two_tensors_of_one_shape_get_different_noise(load):
    noise, ones = load("study_noisy_weights").Noise(0, 0.1), torch.ones(6, 6)
    assert not torch.equal(noise.on("a", ones), noise.on("b", ones))


def test_noise_is_relative_with_the_asked_deviation(load):
    weight = torch.full((400, 400), -3.0)
    factor = load("study_noisy_weights").Noise(1, 0.05).on("w", weight) / weight - 1.0
    # 160,000 draws: the mean is within 4 standard errors of 0 and the deviation within 1%.
    assert abs(float(factor.mean())) < 4 * 0.05 / 400
    assert float(factor.std()) == pytest.approx(0.05, rel=0.01)
    assert torch.equal(weight, torch.full((400, 400), -3.0))


def test_no_noise_is_bit_equal(load):
    assert same(dict(noisy(load, Source(), std=0.0)), Source().tensors)


class CleanPolicy:
    def __init__(self):
        self.calls = []
        self.source = Source(version=1)

    def logprobs(self, batch, pass_name):
        self.calls.append(("logprobs", batch, pass_name))
        return "values"

    def update(self, batch):
        self.calls.append(("update", batch))
        return "report"

    def weights(self):
        return self.source


def test_the_trainer_computes_with_clean_weights(load):
    module, clean = load("study_noisy_weights"), CleanPolicy()
    policy = module.NoisyPolicy(clean, module.Noise(0, 0.1))
    assert (policy.logprobs("batch", "old"), policy.update("batch")) == ("values", "report")
    assert clean.calls == [("logprobs", "batch", "old"), ("update", "batch")]
    assert not same(dict(policy.weights()), clean.source.tensors)


def test_variants_differ_in_what_they_say(load):
    module = load("study_noisy_variants")
    found = {variant.name: module.study_config(variant, 2, ["train.steps=3"]).algorithm for variant in module.VARIANTS}
    assert found["grpo"].ratio_level is RatioLevel.token and found["grpo"].clip_low == 0.2
    for name in ("gspo_exact", "gspo", "gspo_bypass", "gspo_correction", "gspo_correction_trainer"):
        assert found[name].ratio_level is RatioLevel.sequence
    assert not found["gspo"].correction.enabled and not found["grpo"].correction.enabled
    bypass, full = found["gspo_bypass"].correction, found["gspo_correction"].correction
    assert bypass.enabled and (bypass.token, bypass.sequence) == (TokenCorrection.none, SequenceCorrection.none)
    assert bypass.denominator is full.denominator is Denominator.sampler
    assert full.enabled and (full.token, full.sequence) == (TokenCorrection.truncate, SequenceCorrection.sum)
    assert found["gspo_correction_trainer"].correction == replace(full, denominator=Denominator.trainer)
    assert [variant.name for variant in module.VARIANTS if not variant.noisy] == ["gspo_exact"]
    with pytest.raises(ValueError, match="no variant called nothing; there are gspo_exact, grpo"):
        module.chosen(["grpo", "nothing"])


def result(correct, decoding="greedy"):
    n = len(correct)
    return EvalResult(
        split="test",
        n=n,
        decoding=decoding,
        max_tokens=8,
        extraction="boxed",
        reward_version="r",
        version=1,
        accuracy=sum(correct) / n,
        ci95_half_width=0.0,
        format_rate=1.0,
        extracted_rate=1.0,
        truncation_rate=0.0,
        mean_reward=sum(correct) / n,
        mean_length_tokens=3.0,
        prompt_ids=tuple(f"p{i}" for i in range(n)),
        correct=tuple(correct),
    )


def seed_folder(root, seed, after, rows, stopped=None):
    """What a seed leaves behind: 100 prompts, 20 right before, `after` right afterwards."""
    folder = root / f"seed{seed}"
    (folder / "gspo").mkdir(parents=True)

    def held_out(right):
        correct = [1] * right + [0] * (100 - right)
        return {"greedy": result(correct).to_json(), "t1": result(correct, "temperature 1").to_json()}

    (folder / "start.json").write_text(json.dumps({"stopped": None, "held_out": held_out(20)}))
    (folder / "gspo" / "result.json").write_text(json.dumps({"stopped": stopped, "held_out": held_out(after)}))
    (folder / "gspo" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def made_up(load, tmp_path):
    table = load("study_noisy_table")
    steps = [{"step": i, "accuracy": 0.1 * i, "delta_max_abs_nats": float(i), "pg_skew/update_0": (-1.0) ** i} for i in range(6)]
    steps[0]["pg_skew/update_0"] = "NaN"
    rising = table.read_seed(seed_folder(tmp_path, 0, 60, steps), "gspo", 0)
    falling = table.read_seed(seed_folder(tmp_path, 1, 10, steps[:2], stopped="nothing left"), "gspo", 1)
    return table, rising, falling


def test_figures_of_one_run(load, tmp_path):
    table, rising, _ = made_up(load, tmp_path)
    assert rising.gain().mean == pytest.approx(0.4)
    assert rising.gain_t1() == pytest.approx(0.4)
    assert [rising.third("accuracy", index) for index in range(3)] == pytest.approx([0.05, 0.25, 0.45])
    assert rising.over_run("delta_max_abs_nats", table.largest) == 5.0
    # Five batches have a skew: -1, 1, -1, 1, -1.
    assert rising.over_run("pg_skew/update_0", table.mean) == pytest.approx(-0.2)
    assert rising.over_run("pg_skew/update_0", table.size) == 1.0
    assert math.isnan(rising.over_run("correction/rejected_frac/update_0", table.mean))


def test_cells_are_the_mean_and_every_seed(load, tmp_path):
    table, rising, falling = made_up(load, tmp_path)
    runs = [("GSPO", [rising, falling])]
    lines = table.table(table.LEARNING[:4], runs).splitlines()
    assert lines[0] == "| run | greedy after | gain, points | gain at T=1, points | seeds that gained |"
    assert lines[1] == "|---|---|---|---|---|"
    # Gains of 40 and -10 points on 100 paired prompts: both intervals leave 0 out.
    assert lines[2] == "| GSPO | 0.350 (0.600, 0.100) | +15.0 (+40.0, -10.0) | +15.0 (+40.0, -10.0) | 1 of 2, 1 fell |"
    rejected = table.table([("rejected", table.metric("correction/rejected_frac/update_0", ".3f"))], runs)
    assert rejected.splitlines()[-1] == "| GSPO | - |"
    assert table.spread([0.5, math.nan], ".2f") == "0.50 (0.50, -)"


def test_every_run_has_its_line(load, tmp_path):
    table, rising, falling = made_up(load, tmp_path)
    lines = table.intervals([("GSPO", [rising, falling])]).splitlines()
    assert lines[2].startswith("| GSPO | 0 | 0.200 | 0.600 | +40.0 | [+3") and lines[2].endswith("| 6 | no |")
    assert lines[3].startswith("| GSPO | 1 | 0.200 | 0.100 | -10.0 | [-1") and lines[3].endswith("| 2 | nothing left |")


def test_no_logged_batch_is_no_figure(load, tmp_path):
    table = load("study_noisy_table")
    run = table.read_seed(seed_folder(tmp_path, 0, 20, [], stopped="at once"), "gspo", 0)
    assert math.isnan(run.third("accuracy", 0))
    assert table.learned([run]) == "0 of 1"
