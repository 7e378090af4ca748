"""Sequences -> packed micro-batches under a token budget, balanced over data-parallel ranks, and back.

A packed micro-batch is one row of T tokens: whole sequences laid end to end ("segments"), attention kept apart by
`cu_seqlens`. T is rounded up to a multiple by one dummy segment that carries no weight. Every data-parallel rank gets
the same number of micro-batches, because collectives inside the model (expert parallel) count on it; a rank that has
fewer sequences gets dummy micro-batches. The plan depends only on the lengths, so every rank makes the same one.

T tokens of a micro-batch, S segments, B sequences of the batch. No Megatron, no process group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DUMMY = -1
"""Sequence index of a segment that belongs to no sequence."""


@dataclass(frozen=True)
class PackedMicroBatch:
    """One packed row.

    token_ids, positions: int64 [T]; positions restart at 0 in every segment.
    cu_seqlens: int32 [S+1], segment borders, last one T. max_len: longest segment.
    segments: for each segment the index of its sequence in the batch, DUMMY for the padding one.
    segment_of_token: int64 [T], which segment a token lies in.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    segment_of_token: Tensor
    max_len: int
    segments: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """T, the padding included."""
        return self.token_ids.numel()

    @property
    def real(self) -> Tensor:
        """bool [T]: token of a real sequence."""
        owner = torch.tensor(self.segments, dtype=torch.int64) >= 0
        return owner[self.segment_of_token]

    def pack(self, fields: Sequence[Tensor]) -> Tensor:
        """Lay the per-token tensors [T_b] of the batch's sequences out like the tokens: [T], zero in padding."""
        dtype = fields[0].dtype
        parts = [
            fields[index].to(dtype) if index >= 0 else torch.zeros(length, dtype=dtype)
            for index, length in zip(self.segments, self.lengths(), strict=True)
        ]
        return torch.cat(parts)

    def unpack(self, flat: Tensor) -> dict[int, Tensor]:
        """Cut [T] values back into {sequence index: [T_b]}; padding is dropped."""
        pieces = flat.split(self.lengths())
        return {index: piece for index, piece in zip(self.segments, pieces, strict=True) if index >= 0}

    def lengths(self) -> list[int]:
        """Length of every segment."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()


def plan_micro_batches(
    lengths: Sequence[int], *, dp_size: int, token_budget: int, multiple: int = 1, count_multiple: int = 1
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Which sequences go where: plan[dp_rank][micro_batch] = sequence indices, ascending.

    Longest first into the emptiest bin (LPT), with the fewest micro-batches that keep every padded bin within
    `token_budget`. The count is equal on all ranks and a multiple of `count_multiple` (interleaved pipelines need one).
    Raises ValueError for an empty batch, an empty sequence or a sequence longer than the budget.
    """
    budget = token_budget - token_budget % multiple
    _check_lengths(lengths, budget, multiple)
    total = sum(lengths)
    count = max(1, -(-total // (dp_size * budget)))
    while True:
        count = -(-count // count_multiple) * count_multiple
        bins = _fill(lengths, dp_size * count)
        if max(sum(lengths[i] for i in one) for one in bins) <= budget:
            break
        count += 1
    return _deal(bins, lengths, dp_size, count)


def pack_micro_batch(token_ids: Sequence[Tensor], indices: Iterable[int], *, multiple: int = 1) -> PackedMicroBatch:
    """Pack the sequences at `indices` (none: a dummy micro-batch), padded to `multiple` tokens."""
    segments = list(indices)
    parts = [token_ids[i].to(torch.int64) for i in segments]
    used = sum(part.numel() for part in parts)
    padding = -used % multiple if used else multiple
    if padding:
        segments.append(DUMMY)
        parts.append(torch.zeros(padding, dtype=torch.int64))
    lengths = torch.tensor([part.numel() for part in parts], dtype=torch.int64)
    cu_seqlens = torch.zeros(len(parts) + 1, dtype=torch.int32)
    cu_seqlens[1:] = lengths.cumsum(0)
    return PackedMicroBatch(
        token_ids=torch.cat(parts),
        positions=torch.cat([torch.arange(part.numel()) for part in parts]),
        cu_seqlens=cu_seqlens,
        segment_of_token=torch.repeat_interleave(torch.arange(len(parts)), lengths),
        max_len=int(lengths.max()),
        segments=tuple(segments),
    )


def _check_lengths(lengths: Sequence[int], budget: int, multiple: int) -> None:
    if not lengths:
        raise ValueError("cannot plan micro-batches for a batch of 0 sequences")
    shortest, longest = min(lengths), max(lengths)
    if shortest < 1:
        raise ValueError(f"sequence {lengths.index(shortest)} has {shortest} tokens; at least 1 is needed")
    if longest > budget:
        raise ValueError(
            f"sequence {lengths.index(longest)} has {longest} tokens, more than layout.tokens_per_micro_batch allows "
            f"({budget} after rounding down to a multiple of {multiple}); raise it or shorten rollout.max_tokens"
        )


def _fill(lengths: Sequence[int], bins: int) -> list[list[int]]:
    """Longest first, each into the emptiest bin; ties by sequence index and bin number."""
    heap = [(0, number) for number in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, number = heapq.heappop(heap)
        filled[number].append(index)
        heapq.heappush(heap, (load + lengths[index], number))
    return filled


def _deal(bins: list[list[int]], lengths: Sequence[int], dp_size: int, count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Deal bins to ranks, heaviest first: every rank's k-th micro-batch then weighs about the same."""
    order = sorted(bins, key=lambda one: (-sum(lengths[i] for i in one), one))
    return tuple(tuple(tuple(sorted(order[k * dp_size + rank])) for k in range(count)) for rank in range(dp_size))
