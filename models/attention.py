"""Core attention for packed rows without TransformerEngine: on CPU, and on GPUs that lack it.

The T tokens of a packed row are whole sequences laid end to end. They are regrouped into right-padded batches, so that
plain causal attention never lets a token see a neighbouring sequence: what follows a query in its row, be it a later
token or padding, is masked by causality. Sequences of similar length share a batch, so padding never doubles the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


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
    """How a packed row becomes padded batches: their (B, L), the token in each slot, and the slot of each token."""

    batches: tuple[tuple[int, int], ...]
    token_of_slot: Tensor
    slot_of_token: Tensor


@lru_cache(maxsize=64)
def _plan(borders: tuple[int, ...], device: torch.device) -> _Plan:
    """Slots of all batches are numbered one batch after the other. A padding slot repeats its segment's first token."""
    batches: list[tuple[int, int]] = []
    token_of_slot: list[Tensor] = []
    slot_of_token = torch.empty(borders[-1], dtype=torch.int64)
    slot = 0
    for longest, group in _length_classes(borders):
        batches.append((len(group), longest))
        for start, length in group:
            tokens = torch.full((longest,), start)
            tokens[:length] = torch.arange(start, start + length)
            token_of_slot.append(tokens)
            slot_of_token[start : start + length] = torch.arange(slot, slot + length)
            slot += longest
    return _Plan(tuple(batches), torch.cat(token_of_slot).to(device), slot_of_token.to(device))


def packed_causal_attention(query: Tensor, key: Tensor, value: Tensor, borders: tuple[int, ...], scale: float | None) -> Tensor:
    """Causal attention inside each segment.

    query [T, heads, dim], key and value [T, kv heads, dim]; borders: segment borders, 0 first, T last.
    Returns [T, heads, dim]. ValueError when the borders do not cover the T tokens.
    """
    if borders[0] != 0 or borders[-1] != query.shape[0]:
        raise ValueError(f"cu_seqlens runs from {borders[0]} to {borders[-1]}, but there are {query.shape[0]} tokens")
    plan = _plan(borders, query.device)
    sizes = [batch * longest for batch, longest in plan.batches]
    slots = [t.index_select(0, plan.token_of_slot).split(sizes) for t in (query, key, value)]
    shared = key.shape[1] != query.shape[1]
    outputs: list[Tensor] = []
    for shape, *parts in zip(plan.batches, *slots, strict=True):
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=shared)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, plan.slot_of_token)


class PackedAttention(nn.Module):
    """Megatron core attention over packed rows (`qkv_format="thd"`) and nothing else. It has no parameters.

    Context parallelism and dropout are refused with ValueError.
    """

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        """Keep the scale; the other arguments of Megatron's core attention do not matter here."""
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(f"layout.cp = {config.context_parallel_size} needs TransformerEngine (model.impl=te); use cp=1")
        if config.attention_dropout:
            raise ValueError(f"attention_dropout = {config.attention_dropout} is not supported; 0 is")
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any) -> Tensor:
        """[T, heads, dim] x 3 -> [T, heads * dim]; ValueError unless packed_seq_params says thd."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("PackedAttention needs packed sequences: call the model through models.build.forward_packed")
        borders = tuple(packed_seq_params.cu_seqlens_q.tolist())
        return packed_causal_attention(query, key, value, borders, self.softmax_scale).flatten(1)
