"""Pass rates, buckets, band and kill rules; the band file; training on it."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mcore_rl.config.reward import DataGateConfig
from mcore_rl.config.schema import RunConfig, TaskConfig, TaskKind
from mcore_rl.data.band_file import Band, BandRow, Conditions, read_band, write_band
from mcore_rl.data.band_task import BandTask, rendering_sha256
from mcore_rl.data.build import build_task
from mcore_rl.data.tokenizer import build_tokenizer
from mcore_rl.data_gate import PassRate, early_kill_reason, gate_band, in_band, kill_reason, summarise_rates, table
from mcore_rl.data_probe import pass_rates, probe_conditions
from mcore_rl.probe_file import earlier_rows
from mcore_rl.telemetry.jsonl import dump_line
from mcore_rl.types import Completion, Prompt, Score

TOKENIZER = build_tokenizer()
GATE = DataGateConfig()


def rates(*correct, n=8, extracted=None):
    found = [n if extracted is None else extracted] * len(correct)
    return [PassRate(f"probe-p{i}", f"q{i}", "1", n, k, found[i], 0, 0) for i, k in enumerate(correct)]


def test_the_band_of_eight_samples_is_two_to_six():
    """20% of 8 is 1.6 and 80% is 6.4."""
    assert [row.correct for row in rates(*range(9)) if in_band(row, low=0.2, high=0.8)] == [2, 3, 4, 5, 6]
    assert [row.correct for row in rates(*range(6), n=5) if in_band(row, low=0.2, high=0.8)] == [1, 2, 3, 4]


def test_a_summary_in_numbers():
    rows = [*rates(0, 0, 1, 4, 8), PassRate("probe-p5", "q", "1", 8, 3, 3, 5, 2)]
    found = summarise_rates(rows, GATE)
    assert (found.all_wrong, found.mixed, found.all_right, found.in_band) == (2, 3, 1, 2)
    assert found.mixed_by_parser == 1  # the last one: all three answers that parsed are right
    assert found.correct_histogram == (2, 1, 0, 1, 1, 0, 0, 0, 1)
    assert found.accuracy == 16 / 48
    assert (found.extract_rate, found.truncation_rate, found.reward_failures) == (43 / 48, 5 / 48, 2)
    with pytest.raises(ValueError, match=r"2 probed prompts with \[4, 8\] samples"):
        summarise_rates(rates(1) + rates(1, n=4), GATE)
    with pytest.raises(ValueError, match="0 probed prompts"):
        summarise_rates([], GATE)


def verdict(*correct):
    found = summarise_rates(rates(*correct), GATE)
    return kill_reason(probed=found.prompts, mixed=found.mixed, in_band=found.in_band, config=GATE)


def test_the_launch_rule():
    """Fires on all wrong and on all right; not on 70% unanimous with 30% mixed."""
    assert "0 of 10 prompts have right and wrong samples, fewer than data_gate.min_mixed_frac=0.1" in verdict(*[0] * 10)
    assert "0 of 10" in verdict(*[8] * 10)
    assert verdict(*[0] * 4, *[8] * 3, 3, 4, 5) is None
    assert "0 of 10 prompts are in the band" in verdict(*[0] * 7, 1, 1, 7)
    assert verdict(*[0] * 9, 4) is None  # exactly the share that is asked for


def test_a_wrong_answer_that_pays_is_wrong_all_the_same():
    """Buckets are about `correct`: eight samples that all earn -1, and eight that all earn 0.5, are all wrong."""
    prompts = [Prompt(name, (1,), name, "1") for name in ("a", "b")]
    completions = [Completion(p.prompt_id, i, (1,), (2,), (0.0,), "stop", 0) for p in prompts for i in range(8)]
    scores = [Score(reward, False, "3", True, False) for reward in (-1.0, 0.5) for _ in range(8)]
    found = summarise_rates(pass_rates(prompts, completions, scores, samples=8), GATE)
    assert (found.all_wrong, found.all_right, found.mixed) == (2, 0, 0)


def test_pass_rates_count_by_prompt_and_refuse_a_lost_sample():
    prompts = [Prompt(name, (1,), f"question {name}", "1") for name in ("a", "b")]
    completions = [Completion(name, i, (1,), (2,), (0.0,), "stop", 0) for i in range(2) for name in ("b", "a")]
    scores = [Score(float(c.prompt_id == "a"), c.prompt_id == "a", None, True, c.sample_index == 1) for c in completions]
    scores[0] = replace(scores[0], failure="timeout")
    first, second = pass_rates(prompts, completions, scores, samples=2)
    assert (first.question, first.correct, first.extracted, first.truncated, first.reward_failures) == ("question a", 2, 0, 1, 0)
    assert (second.question, second.correct, second.reward_failures) == ("question b", 0, 1)
    with pytest.raises(ValueError, match=r"1 probed prompts do not have 2 samples, first \('a', 1\)"):
        pass_rates(prompts, completions[:3], scores[:3], samples=2)


def row(zero_var, wrong, right):
    return {"zero_var_frac": zero_var, "all_wrong_frac": wrong, "all_right_frac": right, "accuracy": 0.0}


def test_early_kill_looks_once_and_only_at_dead_steps():
    config = DataGateConfig(early_kill_steps=3)
    dead = row(1.0, 1.0, 0.0)
    assert early_kill_reason([dead] * 2, config) is None
    assert "in the first 3 steps every group was unanimous" in early_kill_reason([dead] * 3, config)
    assert early_kill_reason([dead] * 4, config) is None
    assert early_kill_reason([dead, row(1.0, 0.9, 0.0), dead], config) is None  # a mixed group of equal rewards
    assert early_kill_reason([dead, row(0.9, 1.0, 0.0), dead], config) is None  # partial credit varies
    assert early_kill_reason([dead] * 3, GATE) is None


def test_the_table_says_what_to_look_at():
    found = summarise_rates(rates(*[0] * 9, 4), GATE)
    text = "\n".join(table(found, GATE, None))
    assert "10 prompts x 8 samples: accuracy 0.050" in text
    assert "90% of the prompts are all wrong: look at them" in text
    assert "launch rule: passes" in text
    assert "look at them" not in "\n".join(table(summarise_rates(rates(*[4] * 10), GATE), GATE, None))
    assert "KILL, too few" in "\n".join(table(found, GATE, "too few"))


def task(**fields):
    return build_task(TaskConfig(**fields), TOKENIZER, seed=0)


def conditions(made, kind="arithmetic", **changed):
    return replace(Conditions(kind, 0, made.grader.mode, rendering_sha256(made.renderer), "d", 8, 1.0, 32), **changed)


def band_of(made, count=6, **changed):
    rows = tuple(BandRow(p.prompt_id, p.question, p.answer, 8, 4) for p in made.probe_prompts(0, count))
    return Band(conditions(made, **changed), 0.2, 0.8, 2 * count, count + 1, rows)


def test_probe_prompts_are_distinct_stable_and_for_training():
    made = task(min_terms=2, max_terms=3)
    all_of_them = made.probe_prompts(0, 50)
    assert len({p.question for p in all_of_them}) == 50
    assert made.probe_prompts(0, 20) + made.probe_prompts(20, 30) == all_of_them
    assert [p.prompt_id for p in made.probe_prompts(20, 2)] == ["probe-p20", "probe-p21"]
    assert all(made.training_answer(p.question) is not None for p in all_of_them)
    assert not any(made.training_answer(p.question) for p in made.eval_prompts("test", 10))


def test_a_band_file_round_trip_and_its_damage(tmp_path):
    path, band = tmp_path / "band.jsonl", band_of(task())
    write_band(path, band)
    assert read_band(path) == band
    lines = path.read_text().splitlines()
    for text, message in [
        ("\n".join(lines[:-1]) + "\n", "5 rows where its first line counts 6"),
        ("\n".join(lines[1:]) + "\n", "not a band file of format 1"),
        ("", "not a band file"),
        ("\n".join([lines[0], *lines[1:-1], '{"question": "q"}']) + "\n", "missing"),
        ("\n".join([lines[0], "{", *lines[2:]]) + "\n", "line 2: not JSON"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_band(path)
    with pytest.raises(ValueError, match="no such file; mcore-rl probe writes one"):
        read_band(tmp_path / "none.jsonl")


def test_training_reads_the_band_and_nothing_else(tmp_path):
    plain = task()
    write_band(tmp_path / "band.jsonl", band_of(plain))
    banded = task(band_file=str(tmp_path / "band.jsonl"))
    assert isinstance(banded, BandTask)
    inside = {p.question for p in plain.probe_prompts(0, 6)}
    epochs = [[p.question for p in banded.prompts(step, 6)] for step in range(3)]
    assert all(set(epoch) == inside for epoch in epochs)  # every row once an epoch
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert banded.prompts(1, 6) == task(band_file=str(tmp_path / "band.jsonl")).prompts(1, 6)
    assert [p.prompt_id for p in banded.prompts(1, 2)] == ["s1-p0", "s1-p1"]
    assert banded.eval_prompts("test", 5) == plain.eval_prompts("test", 5)
    assert banded.demonstrations(0, 3) == plain.demonstrations(0, 3)
    assert banded.facts()["band"] == {"rows": 6, "probed": 12, "low": 0.2, "high": 0.8}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"extraction": "hash/full/v1"}, "extraction is 'hash/full/v1' there and 'boxed/full/v1' here"),
        ({"task": "countdown"}, "task is 'countdown' there"),
        ({"rendering_sha256": "x"}, "rendering_sha256 is 'x' there"),
    ],
)
def test_a_band_of_another_task_is_refused(tmp_path, changed, message):
    write_band(tmp_path / "band.jsonl", band_of(task(), **changed))
    with pytest.raises(ValueError, match=message):
        task(band_file=str(tmp_path / "band.jsonl"))


def test_a_band_may_be_probed_with_other_sampling(tmp_path):
    write_band(tmp_path / "band.jsonl", band_of(task(), seed=5, samples=16, max_tokens=64))
    assert isinstance(task(band_file=str(tmp_path / "band.jsonl")), BandTask)


def test_held_out_questions_in_a_band_are_refused(tmp_path):
    made = task()
    held = tuple(BandRow(p.prompt_id, p.question, p.answer, 8, 4) for p in made.eval_prompts("test", 1))
    band = band_of(made)
    write_band(tmp_path / "band.jsonl", replace(band, rows=band.rows + held))
    with pytest.raises(ValueError, match="1 of its questions are not training questions of this task"):
        task(band_file=str(tmp_path / "band.jsonl"))
    write_band(tmp_path / "band.jsonl", replace(band, rows=()))
    with pytest.raises(ValueError, match="none of its 12 probed prompts is in the band"):
        task(band_file=str(tmp_path / "band.jsonl"))


def test_the_launch_rule_refuses_a_band_at_the_start_of_training():
    band = band_of(task())
    gate_band(band, DataGateConfig(min_mixed_frac=0.5, min_band_frac=0.5))
    with pytest.raises(ValueError, match=r"task\.band_file: the launch rule refuses this run: 6 of 12 prompts are in the band"):
        gate_band(band, DataGateConfig(min_band_frac=0.6))


def test_a_file_task_trains_on_its_band(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(60)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"kind": TaskKind.file, "train_file": str(tmp_path / "t.jsonl"), "require_full_format": False}
    plain = task(**fields)
    write_band(tmp_path / "band.jsonl", band_of(plain, kind="file"))
    banded = task(**fields, band_file=str(tmp_path / "band.jsonl"))
    assert {p.question for p in banded.prompts(0, 6)} == {p.question for p in plain.probe_prompts(0, 6)}
    with pytest.raises(ValueError, match=r"data_gate\.prompts=1000: only \d+ training prompts"):
        plain.probe_prompts(0, 1000)


def test_a_probe_goes_on_where_an_earlier_one_stopped(tmp_path):
    made, path = task(), tmp_path / "probe.jsonl"
    config = RunConfig()
    now = probe_conditions(SimpleNamespace(config=config), made, "d")
    lines = [{"format": 1, "conditions": vars(now)}, *map(vars, rates(1, 2))]
    path.write_text("".join(dump_line(line) + "\n" for line in lines) + '{"prompt_id": "probe-p2", "ques')
    assert earlier_rows(str(path), now) == rates(1, 2)
    assert earlier_rows(None, now) == []
    for other, message in [
        (replace(now, model_digest="e"), "model_digest is 'd' there and 'e' here"),
        (replace(now, samples=4), "samples is 8 there and 4 here"),
    ]:
        with pytest.raises(ValueError, match=message):
            earlier_rows(str(path), other)
    path.write_text("".join(dump_line(line) + "\n" for line in (lines[0], lines[2])))
    with pytest.raises(ValueError, match="not probe-p0, probe-p1"):
        earlier_rows(str(path), now)
    with pytest.raises(ValueError, match="no such file"):
        earlier_rows(str(tmp_path / "none"), now)
