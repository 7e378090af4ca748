"""Packed rows split over context-parallel ranks, and back: every transfer between the two forms happens here.

A segment of L tokens is cut into 2 x cp chunks of equal length; rank r holds chunks r and 2 cp - 1 - r, so that every rank
has as much causal attention to do as any other. This is how Megatron-Core (rotary embedding) and TransformerEngine
(attention) cut a `thd` row. A rank's part of a row is its chunks of all segments, segment after segment.

The loss of a run is the sum of all ranks' losses, and the gradient on a rank is that of this sum:
`gather_sequence` adds up the gradients that every rank has for this rank's tokens (reduce-scatter); `shard_sequence` of a
row that every rank holds leaves zeros for the other ranks' tokens, because these ranks have the gradient for them.

T tokens of the whole row, cp ranks of the group. dim 0 is tokens everywhere; cu_seqlens are the borders of the whole row.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@lru_cache(maxsize=256)
def _shard(borders: tuple[int, ...], size: int, rank: int) -> Tensor:
    parts: list[Tensor] = []
    for start, stop in pairwise(borders):
        chunk, rest = divmod(stop - start, 2 * size)
        if rest:
            raise ValueError(f"a segment of {stop - start} tokens is not a multiple of 2 x cp = {2 * size}: pad it")
        held = (rank, 2 * size - 1 - rank)
        parts.extend(torch.arange(start + number * chunk, start + (number + 1) * chunk) for number in held)
    return torch.cat(parts)


@lru_cache(maxsize=64)
def rank_order(borders: tuple[int, ...], size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The row's tokens in the order of the ranks' parts laid end to end, and the way back: int64 [T] each, on the device."""
    by_rank = torch.cat([_shard(borders, size, rank) for rank in range(size)])
    return by_rank.to(device), by_rank.argsort().to(device)


def borders_of_parts(x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    """The row's borders; ValueError when parts as long as x [T / cp, ...] are not the row."""
    borders = tuple(cu_seqlens.tolist())
    if x.shape[0] * group.size() != borders[-1]:
        raise ValueError(f"{x.shape[0]} tokens on each of {group.size()} ranks, but the row has {borders[-1]}")
    return borders


def shard_indices(cu_seqlens: Tensor, size: int, rank: int) -> Tensor:
    """Which tokens of the row rank `rank` of `size` holds, in its order: int64 [T / size], on the CPU.

    ValueError when a segment is no multiple of 2 x size (with one rank any length will do).
    """
    borders = tuple(cu_seqlens.tolist())
    return torch.arange(borders[-1]) if size == 1 else _shard(borders, size, rank)


def shard_sequence(x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [T / cp, ...] of a row [T, ...] that every rank of the group holds; see the module for gradients."""
    if group.size() == 1:
        return x
    return x.index_select(0, shard_indices(cu_seqlens, group.size(), group.rank()).to(x.device))


def gather_sequence(x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The row [T, ...] in its own order on every rank, from this rank's part [T / cp, ...]. Collective, also in backward."""
    if group.size() == 1:
        return x
    borders = borders_of_parts(x, cu_seqlens, group)
    gathered: Tensor = _AllGather.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return gathered.index_select(0, rank_order(borders, group.size(), x.device)[1])


class _AllGather(Function):
    """Parts of all ranks in rank order, [cp x n, ...]; backward is the reduce-scatter that belongs to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (grad,) = grad_outputs
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None
