"""A sample in a packed row is what it is alone, and what its neighbours are makes no difference: attention families."""

from dataclasses import replace

import parity_cells
import policy_ranks
import pytest
import torch
from policy_cases import rollouts, with_old
from tiny_models import VOCAB, write_tiny

from mcore_rl.types import TokenBatch
from parallel.layout import ParallelLayout

LAYOUTS = [ParallelLayout(), ParallelLayout(world=2, cp=2)]
SAMPLE = 3  # 13 tokens: under context parallelism both ranks hold some, and the last chunk is padded
ROW = {"tokens_per_micro_batch": 1000}  # all samples in one row


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama_tied"])
def case(request, tmp_path_factory):
    """Folder and batch: old log-probs are far from the model's, but half of the ratios are clipped on one side only."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder, request.param)
    batch = rollouts(vocab=VOCAB)
    return folder, with_old(batch, [torch.zeros(mask.shape) for mask in batch.tokens.loss_mask])


def only(batch, index):
    """The batch with an advantage on one sample alone: its loss is that sample's, in a row shared by all."""
    return replace(batch, advantages=torch.where(torch.arange(8) == index, batch.advantages, 0.0), old_logprobs=None)


def alone(batch, index):
    """The batch of one sample, with the weights it has in the whole one."""
    return replace(
        batch,
        tokens=batch.tokens.select([index]),
        token_weights=(batch.token_weights[index],),
        advantages=batch.advantages[[index]],
        old_logprobs=None,
    )


def together_and_alone(groups, device, folder, batch, index):
    policy = policy_ranks.make_policy(groups, folder, **ROW)
    found = []
    for one in (only(batch, index), alone(batch, index)):
        logits = parity_cells.whole_logits(groups, policy, one.tokens)
        logprobs, gradients = parity_cells.one_backward(policy, one)
        place = index if len(one.tokens) > 1 else 0
        found.append((logits.get(place), logprobs[place], gradients))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_packed_equals_alone(ranks, case, layout):
    folder, batch = case
    for index in (SAMPLE, 6):
        together, by_itself = ranks.run(together_and_alone, layout, folder, batch, index)[0]
        for one, other in zip(together[:2], by_itself[:2], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        assert sum(float(grad.norm()) for grad in by_itself[2].values()) > 0
        assert parity_cells.gradient_distance(together[2], by_itself[2]) <= 1.0


def with_noise(groups, device, folder, tokens):
    policy = policy_ranks.make_policy(groups, folder, **ROW)
    changed = tuple(ids if i == SAMPLE else (ids * 7 + 5) % VOCAB for i, ids in enumerate(tokens.token_ids))
    noisy = TokenBatch(changed, tokens.loss_mask, tokens.sample_ids)
    return [parity_cells.whole_logits(groups, policy, one) for one in (tokens, noisy)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_noise_in_the_neighbours_changes_no_bit(ranks, case, layout):
    folder, batch = case
    before, after = ranks.run(with_noise, layout, folder, batch.tokens)[0]
    assert torch.equal(before[SAMPLE], after[SAMPLE])
    assert not any(torch.equal(before[index], after[index]) for index in before if index != SAMPLE)
