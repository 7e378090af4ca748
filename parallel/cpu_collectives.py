"""What gloo cannot do of the collectives Megatron-Core uses. Applied only by `parallel.cpu_megatron.install`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


def _as_list(sizes: Any) -> Any:
    return sizes.tolist() if isinstance(sizes, Tensor) else sizes


def _uneven(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.shape != tensors[0].shape for tensor in tensors)


def patch_all_to_all() -> None:
    """`all_to_all_single` split sizes arrive as tensors from the token dispatcher: gloo wants lists."""
    original = dist.all_to_all_single

    @functools.wraps(original)
    def all_to_all_single(
        output: Tensor, input: Tensor, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        return original(output, input, _as_list(output_split_sizes), _as_list(input_split_sizes), **kwargs)

    setattr(dist, "all_to_all_single", all_to_all_single)  # noqa: B010


def patch_all_gather() -> None:
    """`all_gather` of unequal sizes (ep > 1 with etp > 1): gloo needs equal ones, so every rank broadcasts its own.

    The opposite, `reduce_scatter` of unequal sizes, works over gloo as it is.
    """
    original = dist.all_gather

    @functools.wraps(original)
    def all_gather(tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not _uneven(tensor_list):
            return original(tensor_list, tensor, group=group, async_op=async_op)
        if async_op:
            raise ValueError("all_gather of unequal sizes over gloo is done rank by rank and cannot be asynchronous")
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        tensor_list[dist.get_group_rank(group, dist.get_rank()) if group else dist.get_rank()].copy_(tensor)
        for target, rank in zip(tensor_list, ranks, strict=True):
            if target.numel():
                _broadcast_into(target, rank, group)
        return None

    setattr(dist, "all_gather", all_gather)  # noqa: B010


def _broadcast_into(target: Tensor, rank: int, group: Any) -> None:
    # A slice of a larger tensor may be strided: gloo wants contiguous memory.
    buffer = target.contiguous()
    dist.broadcast(buffer, src=rank, group=group)
    if buffer.data_ptr() != target.data_ptr():
        target.copy_(buffer)
