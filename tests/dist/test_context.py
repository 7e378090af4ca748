"""Packed rows cut over context-parallel ranks: the zig-zag of Megatron, and gather and shard with their gradients."""

import pytest
import torch

from parallel.context import gather_sequence, shard_indices, shard_sequence
from parallel.layout import ParallelLayout

BORDERS = [0, 8, 12, 28]
LAYOUTS = [ParallelLayout(world=2, cp=2), ParallelLayout(world=4, cp=2)]


def row(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(28, 2, 3, generator=generator).to(dtype), torch.randn(28, 2, 3, generator=generator).to(dtype)


def test_zigzag_by_hand():
    cu = torch.tensor([0, 8, 12], dtype=torch.int32)
    assert shard_indices(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
    assert shard_indices(cu, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
    assert shard_indices(torch.tensor([0, 5]), 1, 0).tolist() == [0, 1, 2, 3, 4]


def test_a_segment_that_cannot_be_cut_is_refused():
    with pytest.raises(ValueError, match="a segment of 6 tokens is not a multiple of 2 x cp = 4"):
        shard_indices(torch.tensor([0, 8, 14]), 2, 0)


def there_and_back(groups, device, dtype):
    """gather(shard(x)), the gradient of gather under a loss that every rank weighs differently, and that of shard."""
    cu, (x, weights) = torch.tensor(BORDERS, dtype=torch.int32), row(dtype)
    part = shard_sequence(x, cu, groups.cp).requires_grad_()
    whole = gather_sequence(part, cu, groups.cp)
    (whole * weights * (1 + groups.at.cp)).sum().backward()
    full = x.clone().requires_grad_()
    shard_sequence(full, cu, groups.cp).sum().backward()
    return torch.equal(whole, x), part.grad, full.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gather_and_shard(ranks, layout, dtype):
    _, weights = row(dtype)
    cu = torch.tensor(BORDERS)
    for rank, (same, of_part, of_full) in enumerate(ranks.run(there_and_back, layout, dtype)):
        mine = shard_indices(cu, 2, layout.coordinates(rank).cp)
        assert same
        torch.testing.assert_close(of_part, 3 * weights[mine])
        assert torch.equal(of_full, torch.zeros_like(weights).index_fill_(0, mine, 1.0))


def too_short(groups, device):
    gather_sequence(torch.zeros(13), torch.tensor(BORDERS), groups.cp)


def test_a_part_of_another_row_is_refused(ranks):
    with pytest.raises(AssertionError, match="13 tokens on each of 2 ranks, but the row has 28"):
        ranks.run(too_short, LAYOUTS[0])
