"""The gated delta rule over packed rows in plain torch: token by token, and in chunks; and the short convolution before it.

For each value head a matrix S [k_head_dim, v_head_dim] starts at zero at every segment border and, token by token,

    S <- exp(g) S + k (beta (v - k^T exp(g) S))^T        o = S^T q / sqrt(k_head_dim)

with q and k of length 1 (arXiv 2412.06464, equation 10). `recurrent_gated_delta_rule` is that sentence. The chunked form
computes the writes of up to 64 tokens at once by one triangular solve (WY form, the paper's section 3.3) and carries S from
chunk to chunk only; chunks start at segment borders, so no state ever crosses one.

Shapes: T tokens of a packed row; borders are the segment borders, 0 first, T last. All arithmetic is fp32 (fp64 for fp64
inputs) whatever the inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_TOKENS = 64
L2_EPS = 1e-6
Borders = tuple[int, ...]


class DeltaRuleInputs(NamedTuple):
    """One layer's heads over a packed row; value head h belongs to key head h // (value heads / key heads).

    q, k [T, key heads, k_head_dim], not yet normalised; v [T, value heads, v_head_dim]; log_decay (g above, <= 0) and
    beta (0..1) [T, value heads].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _unit(x: Tensor) -> Tensor:
    """Length 1 over the last dimension; the epsilon keeps zero vectors zero, and their gradient finite."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _prepare(inputs: DeltaRuleInputs, borders: Borders) -> DeltaRuleInputs:
    """Wide, q and k normalised, q scaled. ValueError when the borders do not cover the tokens."""
    q, k, v, log_decay, beta = (_wide(x) for x in inputs)
    if borders[0] != 0 or borders[-1] != v.shape[0]:
        raise ValueError(f"cu_seqlens runs from {borders[0]} to {borders[-1]}, but there are {v.shape[0]} tokens")
    return DeltaRuleInputs(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, log_decay, beta)


def recurrent_gated_delta_rule(inputs: DeltaRuleInputs, borders: Borders) -> Tensor:
    """Token by token: slow, and what the chunked form is checked against. Returns [T, value heads, v_head_dim] in v's dtype."""
    x = _prepare(inputs, borders)
    shared = x.v.shape[1] // x.k.shape[1]
    q, k = (t.repeat_interleave(shared, dim=1) for t in (x.q, x.k))
    outputs: list[Tensor] = []
    for start, stop in pairwise(borders):
        state = x.v.new_zeros(x.v.shape[1], k.shape[-1], x.v.shape[-1])
        for t in range(start, stop):
            state = state * x.log_decay[t].exp()[:, None, None]
            write = (x.v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * x.beta[t][:, None]
            state = state + k[t][:, :, None] * write[:, None, :]
            outputs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outputs).to(inputs.v.dtype)


@dataclass(frozen=True)
class _Plan:
    """How a packed row becomes chunks: first every segment's first chunk, then every second one, and so on.

    Segments with more chunks come first, so that the segments of a step are a prefix of those of the step before.
    counts: chunks per step. A slot is a place in a chunk; those after a segment's end repeat its last token, which changes
    nothing before them.
    """

    chunk: int
    counts: tuple[int, ...]
    token_of_slot: Tensor
    slot_of_token: Tensor


@lru_cache(maxsize=64)
def _plan(borders: Borders, device: torch.device) -> _Plan:
    segments = sorted((span for span in pairwise(borders) if span[1] > span[0]), key=lambda span: span[0] - span[1])
    longest = segments[0][1] - segments[0][0]
    chunk = min(CHUNK_TOKENS, 1 << (longest - 1).bit_length())
    counts: list[int] = []
    tokens: list[Tensor] = []
    real: list[Tensor] = []
    for first in range(0, longest, chunk):
        here = [(start + first, stop) for start, stop in segments if start + first < stop]
        counts.append(len(here))
        for start, stop in here:
            slots = torch.arange(start, start + chunk)
            tokens.append(slots.clamp(max=stop - 1))
            real.append(slots < stop)
    token_of_slot, is_real = torch.cat(tokens), torch.cat(real)
    slot_of_token = torch.empty(borders[-1], dtype=torch.int64)
    slot_of_token[token_of_slot[is_real]] = is_real.nonzero()[:, 0]
    return _Plan(chunk, tuple(counts), token_of_slot.to(device), slot_of_token.to(device))


class _Chunks(NamedTuple):
    """What a chunk needs beyond the state S it starts with; n chunks, h value heads, c tokens of a chunk.

    writes [n, h, c, v]: the tokens' writes if S were zero; reads [n, h, c, k]: what S takes away from them; scores
    [n, h, c, c]: how much token i gets of the write of token j; queries [n, h, c, k]: what token i reads of S; keys
    [n, h, c, k]: where the writes go in the S that the chunk leaves; decay [n, h, 1, 1]: what is left of S itself.
    """

    writes: Tensor
    reads: Tensor
    scores: Tensor
    queries: Tensor
    keys: Tensor
    decay: Tensor


def _within_chunks(x: DeltaRuleInputs) -> _Chunks:
    """All chunks at once; the inputs are [n, heads, c, dim], log_decay and beta [n, heads, c]."""
    shared = x.v.shape[1] // x.k.shape[1]
    since_start = x.log_decay.cumsum(-1)
    later = torch.ones(since_start.shape[-1], since_start.shape[-1], dtype=torch.bool, device=x.v.device).triu(1)
    # Masked before exp: the positive differences would overflow.
    between = (since_start[..., :, None] - since_start[..., None, :]).masked_fill(later, -torch.inf).exp()
    overlap = (x.k @ x.k.mT).repeat_interleave(shared, dim=1) * between * x.beta[..., None]
    scores = (x.q @ x.k.mT).repeat_interleave(shared, dim=1) * between
    q, k = (t.repeat_interleave(shared, dim=1) for t in (x.q, x.k))
    decay = since_start.exp()[..., None]
    right = torch.cat([x.v * x.beta[..., None], k * (decay * x.beta[..., None])], dim=-1)
    # (1 + strictly lower part of overlap) [writes, reads] = right
    solved = torch.linalg.solve_triangular(overlap, right, upper=False, unitriangular=True)
    writes, reads = solved.split([x.v.shape[-1], k.shape[-1]], dim=-1)
    keys = k * (since_start[..., -1:] - since_start).exp()[..., None]
    return _Chunks(writes, reads, scores, q * decay, keys, decay[..., -1:, :])


def _across_chunks(chunks: _Chunks, counts: tuple[int, ...]) -> Tensor:
    """Carry the state from step to step; [n, h, c, v]."""
    steps = [_Chunks(*parts) for parts in zip(*(t.split(counts) for t in chunks), strict=True)]
    outputs: list[Tensor] = []
    state: Tensor | None = None
    for step, following in zip(steps, (*counts[1:], 0), strict=True):
        writes = step.writes if state is None else step.writes - step.reads @ state
        out = step.scores @ writes
        outputs.append(out if state is None else out + step.queries @ state)
        if following:
            added = step.keys[:following].mT @ writes[:following]
            state = added if state is None else state[:following] * step.decay[:following] + added
    return torch.cat(outputs)


def chunked_gated_delta_rule(inputs: DeltaRuleInputs, borders: Borders) -> Tensor:
    """The same as `recurrent_gated_delta_rule`, in chunks of at most 64 tokens. [T, value heads, v_head_dim] in v's dtype."""
    x = _prepare(inputs, borders)
    plan = _plan(borders, x.v.device)
    chunked = [t.index_select(0, plan.token_of_slot).unflatten(0, (-1, plan.chunk)).transpose(1, 2).contiguous() for t in x]
    out = _across_chunks(_within_chunks(DeltaRuleInputs(*chunked)), plan.counts)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, plan.slot_of_token).to(inputs.v.dtype)


@lru_cache(maxsize=64)
def _positions(borders: Borders, device: torch.device) -> Tensor:
    """Position of each token in its segment, int64 [T, 1]."""
    return torch.cat([torch.arange(stop - start) for start, stop in pairwise(borders)])[:, None].to(device)


def causal_convolution(x: Tensor, weight: Tensor, borders: Borders) -> Tensor:
    """silu of a causal depthwise convolution inside each segment.

    x [T, C]; weight [C, 1, W], its last tap on the token itself. Returns [T, C] in x's dtype.
    """
    wide, taps = _wide(x), _wide(weight)[:, 0].unbind(-1)
    position = _positions(borders, x.device)
    out = wide * taps[-1]
    for back in range(1, min(len(taps), x.shape[0])):
        # where, not times zero: what lies across the border may be infinite.
        earlier = functional.pad(wide[:-back], (0, 0, back, 0)).masked_fill(position < back, 0.0)
        out = torch.addcmul(out, earlier, taps[-1 - back])
    return functional.silu(out).to(x.dtype)
