"""Completions -> training batches: ids as sampled, masks, whole groups, loud refusals."""

from dataclasses import replace

import pytest
import torch

from mcore_rl.batching import build_rollout_batch, sft_batch, split_updates, train_batch
from mcore_rl.config.schema import Aggregation, AlgorithmConfig
from mcore_rl.types import Completion, Prompt, Score, StaleRollout, TokenValues

ALGORITHM = AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean)
PROMPTS = [Prompt("p0", (5, 6), "q0", "1"), Prompt("p1", (7,), "q1", "2")]


def completion(prompt, sample, ids, version=3):
    logprobs = tuple(-0.1 * (k + 1) for k in range(len(ids)))
    return Completion(prompt.prompt_id, sample, prompt.token_ids, tuple(ids), logprobs, "stop", version)


def score(reward):
    return Score(reward=reward, correct=reward == 1.0, extracted=None, format_ok=True, truncated=False)


COMPLETIONS = [
    completion(PROMPTS[0], 0, [11, 2]),
    completion(PROMPTS[0], 1, [12, 13, 2]),
    completion(PROMPTS[1], 0, [14, 2]),
    completion(PROMPTS[1], 1, [2]),
]
REWARDS = [1.0, 0.0, 1.0, 1.0]


def build(completions=COMPLETIONS, rewards=REWARDS, prompts=PROMPTS, version=3):
    scores = [score(r) for r in rewards]
    return build_rollout_batch(prompts, completions, scores, algorithm=ALGORITHM, version=version, samples_per_prompt=2)


def test_layout_by_hand():
    batch = build()
    assert [ids.tolist() for ids in batch.tokens.token_ids] == [[5, 6, 11, 2], [5, 6, 12, 13, 2], [7, 14, 2], [7, 2]]
    assert [m.tolist() for m in batch.tokens.loss_mask][:1] == [[False, False, True, True]]
    assert batch.tokens.loss_mask[3].tolist() == [False, True]
    torch.testing.assert_close(batch.sampler_logprobs[1], torch.tensor([0.0, 0.0, -0.1, -0.2, -0.3]))
    assert batch.tokens.sample_ids == ("p0/0", "p0/1", "p1/0", "p1/1")
    torch.testing.assert_close(batch.advantages.values, torch.tensor([0.7071, -0.7071, 0.0, 0.0]), rtol=0, atol=1e-4)
    assert batch.advantages.zero_variance_groups == 1


def test_train_batch_weighs_its_own_samples():
    batch = build()
    values = TokenValues(tuple(torch.full((len(i),), -float(n)) for n, i in enumerate(batch.tokens.token_ids)), ())
    update = train_batch(batch, [2, 3], ALGORITHM, old=values)
    assert [w.tolist() for w in update.token_weights] == [[0.0, 0.25, 0.25], [0.0, 0.5]]
    assert update.old_logprobs is not None and update.old_logprobs[0].tolist() == [-2.0] * 3
    assert update.tokens.sample_ids == ("p1/0", "p1/1")
    assert train_batch(batch, [0, 1], ALGORITHM, old=None).old_logprobs is None


def test_updates_are_whole_groups_and_cover_the_batch():
    prompt_ids = [f"p{i // 4}" for i in range(32)]
    halves = split_updates(prompt_ids, 2, seed=0, step=5)
    assert sorted(halves[0] + halves[1]) == list(range(32)) and len(halves[0]) == 16
    assert not {prompt_ids[i] for i in halves[0]} & {prompt_ids[i] for i in halves[1]}
    assert halves == split_updates(prompt_ids, 2, seed=0, step=5)
    assert halves != split_updates(prompt_ids, 2, seed=0, step=6) and halves != split_updates(prompt_ids, 2, seed=1, step=5)


def test_updates_follow_prompt_ids_not_positions():
    prompt_ids = [f"p{i // 4}" for i in range(32)]
    reverse = prompt_ids[::-1]
    straight = split_updates(prompt_ids, 2, seed=0, step=0)
    turned = split_updates(reverse, 2, seed=0, step=0)
    assert [{prompt_ids[i] for i in part} for part in straight] == [{reverse[i] for i in part} for part in turned]


@pytest.mark.parametrize("updates", [0, 3])
def test_uneven_updates_are_refused(updates):
    with pytest.raises(ValueError, match=f"updates_per_batch={updates} does not divide the 8 groups"):
        split_updates([f"p{i // 4}" for i in range(32)], updates, seed=0, step=0)


def test_stale_completion_is_refused():
    with pytest.raises(StaleRollout, match="p0/0 was sampled with version 3; the trainer holds 4"):
        build(version=4)


FIRST = COMPLETIONS[0]


@pytest.mark.parametrize(
    ("completions", "needle"),
    [
        ([replace(FIRST, prompt_token_ids=(5, 9)), *COMPLETIONS[1:]], "p0/0: the engine's prompt ids differ"),
        ([replace(FIRST, logprobs=(-0.1,)), *COMPLETIONS[1:]], "p0/0: 2 token ids but 1 log-probs"),
        ([replace(FIRST, logprobs=(-0.1, float("nan"))), *COMPLETIONS[1:]], "p0/0: a sampler log-prob is not finite"),
        ([replace(FIRST, token_ids=(), logprobs=()), *COMPLETIONS[1:]], "p0/0: 2 prompt and 0 response tokens"),
        ([replace(FIRST, prompt_id="p9"), *COMPLETIONS[1:]], "p9/0 belongs to no prompt"),
        ([FIRST, FIRST, *COMPLETIONS[2:]], "p0/0 came back twice"),
        (COMPLETIONS[1:], r"1 prompts do not have 2 completions, first p0 \(1\)"),
        (COMPLETIONS[:2], r"1 prompts do not have 2 completions, first p1 \(0\)"),
    ],
)
def test_malformed_completions_name_the_sample(completions, needle):
    with pytest.raises(ValueError, match=needle):
        build(completions, REWARDS[: len(completions)])


def test_lost_score_and_doubled_prompt_id_are_refused():
    with pytest.raises(ValueError, match="4 completions but 3 scores"):
        build(rewards=REWARDS[:3])
    with pytest.raises(ValueError, match="2 prompts carry only 1"):
        build(prompts=[PROMPTS[0], PROMPTS[0]])


def test_supervised_batch_trains_the_response_and_stop_token():
    batch = sft_batch([(PROMPTS[0], (11, 2)), (PROMPTS[1], (12, 13, 2)), (PROMPTS[0], (11, 2))])
    assert [w.tolist() for w in batch.token_weights][1] == pytest.approx([0.0, 1 / 7, 1 / 7, 1 / 7])
    assert batch.advantages.tolist() == [0.0] * 3 and batch.old_logprobs is None
    assert len(set(batch.tokens.sample_ids)) == 3
