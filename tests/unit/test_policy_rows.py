"""What a loss is given of a packed row."""

import math

import pytest
import torch

from mcore_rl.algorithms.losses import policy_loss
from mcore_rl.config.algorithm import Aggregation, AlgorithmConfig
from mcore_rl.policy_rows import PolicyRow, RowValues
from parallel.packing import pack_micro_batch


def test_a_dropped_token_takes_no_part_in_the_sequences_ratio():
    """GSPO over the tokens kept: s = exp(mean of their log-ratios), gradient -A s / L of each, exactly 0 of the dropped."""
    packed = pack_micro_batch([torch.tensor([5, 6, 7, 8])], range(1), multiple=1)
    weights = torch.tensor([1 / 3, 1 / 3, 1 / 3, 0.0])
    old, moved = torch.full((4,), -1.0), torch.tensor([1e-4, -2e-4, 4e-4, 9.0])
    fields = {"weights": weights, "old": old}
    row = PolicyRow(
        index=0,
        packed=packed,
        token_ids=packed.token_ids,
        cu_seqlens=packed.cu_seqlens,
        mask=torch.ones(4, dtype=torch.bool),
        part=torch.arange(4),
        advantages=torch.tensor([2.0]),
        fields=fields,
    )
    current = (old + moved).requires_grad_()
    inputs = row.loss_inputs(RowValues(current, torch.zeros(4), None))
    found = policy_loss(AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean))(inputs)
    loss = row.weigh(found.values)
    (grad,) = torch.autograd.grad(loss, current)
    ratio = math.exp(1e-4)  # the mean of 1e-4, -2e-4 and 4e-4
    assert float(loss.detach()) == pytest.approx(-2.0 * ratio, rel=1e-6)
    torch.testing.assert_close(grad, torch.tensor([-2.0 * ratio / 3] * 3 + [0.0]), rtol=1e-5, atol=0.0)
