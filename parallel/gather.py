"""A tensor-parallel shard back to the full tensor, one tensor at a time.

Shards travel by broadcast, not by all_gather: over gloo an all_gather moves a sixth to a seventh of the bytes per second.
Nothing is kept between calls.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def gather_shards(shard: Tensor, group: ProcessGroup) -> list[Tensor]:
    """Every rank's shard of the group, in group order, on every rank of it. All shards have the shape and dtype of this one.

    A group of one returns the tensor itself, without a copy. Collective over the group.
    """
    if group.size() == 1:
        return [shard.detach()]
    mine = shard.detach().contiguous()
    shards = [mine if rank == group.rank() else torch.empty_like(mine) for rank in range(group.size())]
    for part, source in zip(shards, dist.get_process_group_ranks(group), strict=True):
        dist.broadcast(part, src=source, group=group)
    return shards


def gather_full(shard: Tensor, group: ProcessGroup, *, dim: int) -> Tensor:
    """The shards joined along `dim`, on every rank of the group. Collective over the group."""
    shards = gather_shards(shard, group)
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=dim).contiguous()


def collect_shards(shard: Tensor, group: ProcessGroup, *, owner: int) -> list[Tensor] | None:
    """Every rank's shard, in group order, on group rank `owner` alone; None on the others. Collective over the group.

    Half the traffic of `gather_shards` at two ranks, less at more: for an owner that writes the tensor somewhere.
    """
    if not 0 <= owner < group.size():
        raise ValueError(f"owner {owner} is not a rank of a group of {group.size()}")
    mine = shard.detach().contiguous()
    ranks = dist.get_process_group_ranks(group)
    if group.rank() != owner:
        dist.send(mine, dst=ranks[owner], group=group)
        return None
    shards = []
    for index, rank in enumerate(ranks):
        part = mine if index == owner else torch.empty_like(mine)
        if index != owner:
            dist.recv(part, src=rank, group=group)
        shards.append(part)
    return shards


def collect_full(shard: Tensor, group: ProcessGroup, *, dim: int, owner: int) -> Tensor | None:
    """The shards joined along `dim` on group rank `owner`; None on the others. Collective over the group."""
    shards = collect_shards(shard, group, owner=owner)
    if shards is None:
        return None
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=dim).contiguous()
