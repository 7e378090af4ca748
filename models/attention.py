"""Core attention for packed rows without TransformerEngine: on CPU, and on GPUs that lack it.

The T tokens of a packed row are whole sequences laid end to end. They are regrouped into right-padded batches, so that
plain causal attention never lets a token see a neighbouring sequence: what follows a query in its row, be it a later
token or padding, is masked by causality. Sequences of similar length share a batch, so padding never doubles the work.

Under context parallelism a rank has the queries of its part of the row (parallel.context), and gathers the keys and values
of all of it. Its queries lie anywhere in a sequence, so causality takes a mask as large as the scores; TransformerEngine
does without.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parallel.context import gather_sequence, shard_indices


@lru_cache(maxsize=256)
def _length_classes(borders: tuple[int, ...]) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
    """Group segments (start, length) by the power of two their length rounds up to; longest length of each group first."""
    groups: dict[int, list[tuple[int, int]]] = {}
    for start, stop in pairwise(borders):
        if stop > start:
            groups.setdefault((stop - start - 1).bit_length(), []).append((start, stop - start))
    return tuple((max(length for _, length in group), tuple(group)) for _, group in sorted(groups.items()))


@dataclass(frozen=True)
class _Plan:
    """How a packed row becomes padded batches; the slots of all batches are numbered one batch after the other.

    shapes: (B, Lq, Lk) of each batch. query_of_slot, key_of_slot: the query (of this rank's) and the key (of the whole
    row's) in each slot; a padding slot repeats the first of its segment. slot_of_query: where each query went.
    masks: bool [B, 1, Lq, Lk], which keys a query sees; None where causality is all there is to say.
    """

    shapes: tuple[tuple[int, int, int], ...]
    query_of_slot: Tensor
    key_of_slot: Tensor
    slot_of_query: Tensor
    masks: tuple[Tensor | None, ...]


def _slots(starts: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Indices [B, width] of runs that begin at `starts`, and which of the slots are no padding."""
    offsets = torch.arange(width)[None]
    real = offsets < lengths[:, None]
    return starts[:, None] + torch.where(real, offsets, 0), real


@lru_cache(maxsize=64)
def _plan(borders: tuple[int, ...], size: int, rank: int, device: torch.device) -> _Plan:
    """For context-parallel rank `rank` of `size`, which holds an equal share of every segment, in segment order."""
    row = shard_indices(torch.tensor(borders), size, rank)
    shapes, queries, keys, real, masks = [], [], [], [], []
    for longest, group in _length_classes(borders):
        starts, lengths = torch.tensor(group).T
        key, key_real = _slots(starts, lengths, longest)
        query, query_real = _slots(starts // size, lengths // size, longest // size)
        seen = (key[:, None] <= row[query][..., None]) & key_real[:, None]
        masks.append(None if size == 1 else seen[:, None].to(device))
        shapes.append((len(group), longest // size, longest))
        queries.append(query.flatten())
        keys.append(key.flatten())
        real.append(query_real.flatten())
    query_of_slot, is_real = torch.cat(queries), torch.cat(real)
    slot_of_query = torch.empty_like(row)
    slot_of_query[query_of_slot[is_real]] = is_real.nonzero()[:, 0]
    indices = (part.to(device) for part in (query_of_slot, torch.cat(keys), slot_of_query))
    return _Plan(tuple(shapes), *indices, masks=tuple(masks))


def packed_causal_attention(
    query: Tensor, key: Tensor, value: Tensor, borders: tuple[int, ...], scale: float | None, *, part: tuple[int, int] = (0, 1)
) -> Tensor:
    """Causal attention inside each segment.

    key and value [T, kv heads, dim] of the whole row; part (rank, size): query [T / size, heads, dim] are those of the
    tokens that context-parallel rank `rank` of `size` holds. borders: segment borders, 0 first, T last.
    Returns [T / size, heads, dim]. ValueError when the borders do not cover the tokens.
    """
    rank, size = part
    if borders[0] != 0 or not borders[-1] == key.shape[0] == query.shape[0] * size:
        raise ValueError(
            f"cu_seqlens runs from {borders[0]} to {borders[-1]}, but there are {key.shape[0]} tokens "
            f"and queries of {query.shape[0]} x {size}"
        )
    plan = _plan(borders, size, rank, query.device)
    q_sizes = [batch * queries for batch, queries, _ in plan.shapes]
    k_sizes = [batch * keys for batch, _, keys in plan.shapes]
    q_slots = query.index_select(0, plan.query_of_slot).split(q_sizes)
    k_slots, v_slots = (t.index_select(0, plan.key_of_slot).split(k_sizes) for t in (key, value))
    shared = key.shape[1] != query.shape[1]
    outputs: list[Tensor] = []
    for (batch, _, _), mask, *slots in zip(plan.shapes, plan.masks, q_slots, k_slots, v_slots, strict=True):
        q, k, v = (part.unflatten(0, (batch, -1)).transpose(1, 2) for part in slots)
        out = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=shared
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.slot_of_query)


class PackedAttention(nn.Module):
    """Megatron core attention over packed rows (`qkv_format="thd"`) and nothing else. It has no parameters.

    With context parallelism its inputs are this rank's part of the row. Dropout is refused with ValueError.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, pg_collection: Any = None, **__: Any) -> None:
        """Keep the scale and the context-parallel group; Megatron's other arguments do not matter here."""
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout} is not supported; 0 is")
        if config.context_parallel_size > 1 and pg_collection is None:
            raise ValueError(f"layout.cp = {config.context_parallel_size}: the attention was given no process groups")
        self.softmax_scale = softmax_scale
        self._group = pg_collection.cp if config.context_parallel_size > 1 else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Tensor:
        """[T / cp, heads, dim] x 3 -> [T / cp, heads * dim]; ValueError unless packed_seq_params says thd."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed sequences: call the model through models.build.forward_packed")
        cu_seqlens = packed_seq_params.cu_seqlens_q
        part = (0, 1)
        if self._group is not None:
            part = (self._group.rank(), self._group.size())
            key, value = gather_sequence(torch.stack([key, value], dim=1), cu_seqlens, self._group).unbind(1)
        borders = tuple(cu_seqlens.tolist())
        return packed_causal_attention(query, key, value, borders, self.softmax_scale, part=part).flatten(1)
