"""Tokens of a packed row against heads, between context-parallel ranks: one all-to-all each way.

A layer whose state runs along the whole row cannot work on a part of it. It can work on a part of its heads: every rank
gives away its tokens' columns of the other ranks' heads and gets its own heads' columns of all tokens. cp ranks of the
group, T tokens of the row, t = T / cp of them on this rank; cu_seqlens are the borders of the whole row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from parallel.context import borders_of_parts, rank_order


class _AllToAll(Function):
    """Block r of dimension 0 goes to rank r; the blocks that arrive lie in rank order. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        grad = grad_outputs[0].contiguous()
        out = torch.empty_like(grad)
        dist.all_to_all_single(out, grad, group=ctx.group)
        return out, None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _AllToAll.apply(x, group)  # pyright: ignore[reportAssignmentType]
    return out


def tokens_to_heads(x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[t, cp, F], columns [:, r] for rank r, to this rank's columns of the whole row [T, F], in the row's order.

    ValueError when the ranks' parts are not the row. Collective, also in backward.
    """
    borders = borders_of_parts(x, cu_seqlens, group)
    received = _all_to_all(x.transpose(0, 1), group).flatten(0, 1)
    return received.index_select(0, rank_order(borders, group.size(), x.device)[1])


def heads_to_tokens(x: Tensor, cu_seqlens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: [T, F] of this rank's heads to [t, cp, F] of this rank's tokens. Collective, also in backward."""
    by_rank = rank_order(tuple(cu_seqlens.tolist()), group.size(), x.device)[0]
    sent = x.index_select(0, by_rank).unflatten(0, (group.size(), -1))
    return _all_to_all(sent, group).transpose(0, 1)
