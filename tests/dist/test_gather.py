"""Shards become the full tensor again, on every rank or on the owner alone."""

import pytest
import torch

from parallel import gather
from parallel.layout import ParallelLayout

FULL = torch.arange(24.0).reshape(4, 6)


def gathered(groups, device, dim, dtype):
    shard = FULL.to(dtype).chunk(groups.tp.size(), dim=dim)[groups.at.tp]
    full = gather.gather_full(shard, groups.tp, dim=dim)
    owned = [gather.collect_full(shard, groups.tp, dim=dim, owner=owner) for owner in range(groups.tp.size())]
    return full, owned, groups.at.tp, full.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(world=2, tp=2), ParallelLayout(world=4, tp=2)], ids=str)
def test_full_tensor(ranks, layout, dim, dtype):
    for full, owned, rank, contiguous in ranks.run(gathered, layout, dim, dtype):
        assert torch.equal(full, FULL.to(dtype))
        assert contiguous
        for owner, tensor in enumerate(owned):
            if owner == rank:
                assert torch.equal(tensor, FULL.to(dtype))
            else:
                assert tensor is None


def unknown_owner(groups, device):
    try:
        gather.collect_shards(FULL, groups.tp, owner=2)
    except ValueError as error:
        return str(error)
    return "accepted"


def test_unknown_owner_is_refused(ranks):
    assert ranks.run(unknown_owner, ParallelLayout(world=2, tp=2)) == ["owner 2 is not a rank of a group of 2"] * 2
