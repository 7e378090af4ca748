"""Sequences -> packed micro-batches under a token budget, balanced over data-parallel ranks, and back.

A packed micro-batch is one row of T tokens: whole sequences laid end to end ("segments"), attention kept apart by
`cu_seqlens`. Under context parallelism each sequence is padded at its end, so that its segment can be cut (parallel.context);
T is rounded up to a multiple by one dummy segment. Padding carries no weight, and causality keeps it from being seen. Every
data-parallel rank gets the same number of micro-batches, because collectives inside the model (expert parallel) count on
it; a rank that has fewer sequences gets dummy micro-batches. The plan depends only on the lengths, so every rank makes the
same one.

T tokens of a micro-batch, S segments, B sequences of the batch. No Megatron, no process group.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

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
    used: for each segment how many of its tokens, the first ones, are its sequence's; 0 for the padding one.
    segment_of_token: int64 [T], which segment a token lies in.
    """

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    segment_of_token: Tensor
    max_len: int
    segments: tuple[int, ...]
    used: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """T, the padding included."""
        return self.token_ids.numel()

    @property
    def real(self) -> Tensor:
        """bool [T]: token of a real sequence."""
        return self.positions < torch.tensor(self.used)[self.segment_of_token]

    def pack(self, fields: Sequence[Tensor]) -> Tensor:
        """Lay the per-token tensors [T_b, ...] of the batch's sequences out like the tokens: [T, ...], zero in padding."""
        dtype, width = fields[0].dtype, fields[0].shape[1:]
        parts: list[Tensor] = []
        for index, length, used in zip(self.segments, self.lengths(), self.used, strict=True):
            parts.extend([fields[index].to(dtype)] if index >= 0 else [])
            parts.append(torch.zeros((length - used, *width), dtype=dtype))
        return torch.cat(parts)

    def unpack(self, flat: Tensor) -> dict[int, Tensor]:
        """Cut [T] values back into {sequence index: [T_b]}; padding is dropped."""
        pieces = zip(self.segments, flat.split(self.lengths()), self.used, strict=True)
        return {index: piece[:used] for index, piece, used in pieces if index >= 0}

    def lengths(self) -> list[int]:
        """Length of every segment, its padding included."""
        return (self.cu_seqlens[1:] - self.cu_seqlens[:-1]).tolist()


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    dp_size: int,
    token_budget: int,
    multiple: int = 1,
    segment_multiple: int = 1,
    count_multiple: int = 1,
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Which sequences go where: plan[dp_rank][micro_batch] = sequence indices, ascending.

    Longest first into the emptiest bin (LPT), with the fewest micro-batches that keep every padded bin within
    `token_budget`: T is a multiple of `multiple`, every segment one of `segment_multiple`, which divides the former. The
    count is equal on all ranks and a multiple of `count_multiple` (interleaved pipelines need one).
    Raises ValueError for an empty batch, an empty sequence or a sequence longer than the budget.
    """
    budget = token_budget - token_budget % multiple
    padded = [_padded(length, segment_multiple) for length in lengths]
    _check_lengths(lengths, padded, budget, multiple)
    lengths = padded
    total = sum(lengths)
    count = max(1, -(-total // (dp_size * budget)))
    while True:
        count = -(-count // count_multiple) * count_multiple
        bins = _fill(lengths, dp_size * count)
        if max(sum(lengths[i] for i in one) for one in bins) <= budget:
            break
        count += 1
    return _deal(bins, lengths, dp_size, count)


def pack_micro_batch(
    token_ids: Sequence[Tensor], indices: Iterable[int], *, multiple: int = 1, segment_multiple: int = 1
) -> PackedMicroBatch:
    """Pack the sequences at `indices` (none: a dummy micro-batch), padded as planned; padding is token 0.

    ValueError when `segment_multiple` does not divide `multiple`.
    """
    if multiple % segment_multiple:
        raise ValueError(
            f"a row of a multiple of {multiple} tokens cannot be made of segments of a multiple of {segment_multiple}"
        )
    segments = list(indices)
    used = [token_ids[i].numel() for i in segments]
    lengths = [_padded(length, segment_multiple) for length in used]
    padding = -sum(lengths) % multiple if lengths else multiple
    if padding:
        segments, used, lengths = [*segments, DUMMY], [*used, 0], [*lengths, padding]
    of_segment = torch.tensor(lengths)
    cu_seqlens = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    cu_seqlens[1:] = of_segment.cumsum(0)
    row = PackedMicroBatch(
        token_ids=torch.empty(0, dtype=torch.int64),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        cu_seqlens=cu_seqlens,
        segment_of_token=torch.repeat_interleave(torch.arange(len(lengths)), of_segment),
        max_len=max(lengths),
        segments=tuple(segments),
        used=tuple(used),
    )
    return replace(row, token_ids=row.pack([ids.to(torch.int64) for ids in token_ids]))


def _padded(length: int, multiple: int) -> int:
    return length + -length % multiple


def _check_lengths(lengths: Sequence[int], padded: Sequence[int], budget: int, multiple: int) -> None:
    if not lengths:
        raise ValueError("cannot plan micro-batches for a batch of 0 sequences")
    shortest, longest = min(lengths), max(padded)
    if shortest < 1:
        raise ValueError(f"sequence {lengths.index(shortest)} has {shortest} tokens; at least 1 is needed")
    if longest > budget:
        index = padded.index(longest)
        padding = f" ({longest} with padding)" if longest > lengths[index] else ""
        raise ValueError(
            f"sequence {index} has {lengths[index]} tokens{padding}, more than layout.tokens_per_micro_batch allows "
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
