"""Sampling from the trainer's own modules: the distribution is the model's, delta is exactly zero, layouts agree."""

from collections import Counter

import pytest
import torch
from sampler_ranks import sample_on_ranks
from tiny_models import transformers_logits, write_tiny

from mcore_rl.policy_sampler import draw
from parallel.layout import ParallelLayout

ONE = ParallelLayout()
LAYOUTS = [
    ParallelLayout(world=2, tp=2, sp=True),
    ParallelLayout(world=2, ep=2),
    ParallelLayout(world=2, pp=2),
    ParallelLayout(world=2, cp=2),
]
PROMPTS = [(5, 9, 17), (44, 3, 20, 100, 7), (8,)]
SAMPLING = {"temperature": 1.0, "max_tokens": 6, "stop_token_ids": (3, 50, 90, 120), "samples_per_prompt": 3, "seed": 5}
SEQUENCES = [[4, 8, 15, 16], [23, 42]]


@pytest.fixture(scope="module")
def case(ranks, tmp_path_factory):
    """The checkpoint's folder, transformers' model, and what one rank sampled."""
    folder = tmp_path_factory.mktemp("moe")
    model = write_tiny(folder, "qwen3_moe")
    ((made, scores, old, logits),) = ranks.run(sample_on_ranks, ONE, folder, PROMPTS, SAMPLING, SEQUENCES)
    return folder, model, made, scores, old, logits


def test_recorded_logprobs_are_the_old_pass_to_the_last_bit_and_the_models(case):
    _, model, made, scores, old, logits = case
    assert [(one["prompt_id"], one["sample_index"]) for one in made] == [(f"p{i}", j) for i in range(3) for j in range(3)]
    rows = [torch.tensor([*one["prompt_token_ids"], *one["token_ids"]]) for one in made]
    reference = transformers_logits(model, rows)
    for one, ours, row, wanted, last in zip(made, old, rows, reference, logits, strict=True):
        start = len(one["prompt_token_ids"])
        assert ours[start:].tolist() == list(one["logprobs"])
        wanted_logprobs = wanted.log_softmax(-1)[:-1].gather(1, row[1:, None])[:, 0]
        assert float((wanted_logprobs[start - 1 :] - ours[start:]).abs().max()) < 1e-4
        assert float((last - wanted[-1]).abs().max()) < 1e-4
        stopped = one["token_ids"][-1] in SAMPLING["stop_token_ids"]
        assert one["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or len(one["token_ids"]) == SAMPLING["max_tokens"]
        assert not set(one["token_ids"][:-1]) & set(SAMPLING["stop_token_ids"])
    assert len({one["token_ids"] for one in made}) > 6
    for ids, found in zip(SEQUENCES, scores, strict=True):
        wanted = transformers_logits(model, [torch.tensor(ids)])[0].log_softmax(-1)[:-1]
        assert found == pytest.approx(wanted.gather(1, torch.tensor(ids)[1:, None])[:, 0].tolist(), abs=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_draws_the_same_answers(ranks, case, layout):
    folder, _, made, *_ = case
    for again, _, old, _ in ranks.run(sample_on_ranks, layout, folder, PROMPTS, SAMPLING, SEQUENCES):
        assert [one["token_ids"] for one in again] == [one["token_ids"] for one in made]
        for one, ours in zip(again, old, strict=True):
            assert ours[len(one["prompt_token_ids"]) :].tolist() == list(one["logprobs"])


def test_draws_follow_the_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -30.0])
    generator = torch.Generator().manual_seed(1)
    for temperature in (1.0, 0.5):
        counts = Counter(draw(logits, temperature, generator) for _ in range(20_000))
        wanted = (logits / temperature).softmax(-1)
        assert all(abs(counts[token] / 20_000 - float(p)) < 0.011 for token, p in enumerate(wanted))  # 3 sigma
    assert draw(logits, 0.0, generator) == 2
