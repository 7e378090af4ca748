"""How per-token losses become one number: a weight per token, computed once on the global batch of an update.

The loss is the plain sum of weight x token loss, so no micro-batch, rank or packing can change it.
With m the loss mask, L_i = sum_t m_it, N the sequences that have at least one trained token:

    token_mean               m_it / sum_i L_i
    seq_mean_token_mean      m_it / (N L_i)
    seq_mean_token_sum       m_it / N
    seq_mean_token_sum_norm  m_it / (N C), C = length_norm_tokens, constant through training (Dr. GRPO, arXiv 2503.20783)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.config.algorithm import Aggregation


@dataclass(frozen=True)
class TokenWeights:
    """weights: B fp32 tensors [T_b]. zero_token_sequences: sequences without a trained token; they count nowhere."""

    weights: tuple[Tensor, ...]
    trained_tokens: int
    zero_token_sequences: int


def token_weights(masks: Sequence[Tensor], mode: Aggregation | None, *, length_norm_tokens: int | None = None) -> TokenWeights:
    """Weight of every token. ValueError when `mode` is missing, nothing is trained, or the length constant is missing."""
    if mode is None:
        raise ValueError(f"algorithm.aggregation is not set; choose one of {[m.value for m in Aggregation]}")
    counts = [int(mask.sum()) for mask in masks]
    trained = sum(count > 0 for count in counts)
    if trained == 0:
        raise ValueError(f"no token is trained in this update of {len(counts)} sequences: its loss is undefined")
    per_token = _per_token(counts, trained, mode, length_norm_tokens)
    return TokenWeights(
        weights=tuple(mask.to(torch.float32) * weight for mask, weight in zip(masks, per_token, strict=True)),
        trained_tokens=sum(counts),
        zero_token_sequences=len(counts) - trained,
    )


def _per_token(counts: list[int], trained: int, mode: Aggregation, length_norm_tokens: int | None) -> list[float]:
    """Weight of one trained token of every sequence."""
    if mode is Aggregation.token_mean:
        return [1.0 / sum(counts)] * len(counts)
    if mode is Aggregation.seq_mean_token_mean:
        return [1.0 / (trained * count) if count else 0.0 for count in counts]
    if mode is Aggregation.seq_mean_token_sum:
        return [1.0 / trained] * len(counts)
    if length_norm_tokens is None or length_norm_tokens < 1:
        raise ValueError(f"algorithm.length_norm_tokens={length_norm_tokens}: {mode.value} needs a positive number of tokens")
    return [1.0 / (trained * length_norm_tokens)] * len(counts)
