"""Correction of the mismatch between the sampler mu and the trainer pi' at the same weights.

delta_t = log pi'_t - log mu_t (nats), w_t = e^delta_t: 1 exactly wherever the two agree. Three ratios, r = r' w:
r = pi / mu (denominator sampler), r' = pi / pi' (denominator trainer). All factors here are constants of the update.

    denominator   token      factor of the token's policy term      so that at the sampling weights it weighs
    trainer       truncate   min(w, cap)                            min(w, cap)
    trainer       mask       w inside [floor, cap], else dropped    w
    sampler       truncate   min(1, cap / w)                        r x that = min(w, cap)
    sampler       mask       1 inside [floor, cap], else dropped    r = w

A sequence ratio carries no token's own w but e^(mean of delta over the tokens kept); with it the last column's sampler rows
are the factor times that.

With denominator sampler the clip measures from the distribution that really sampled; with trainer it measures from one that
never did, and r' is 1 before the first update whatever the mismatch. A response is rejected when |sum_t delta_t| (sum) or
|mean_t delta_t| (mean) exceeds a bound. What is dropped or rejected leaves the loss and its denominators; baselines keep it.

Truncating tokens together with rejecting responses on the sum came closest to a run with an exact sampler among the
corrections compared by Zhong et al. (2026); it is the default once the correction is on. Truncation: arXiv 1811.01561 and
"Your efficient RL framework secretly brings you off-policy RL training" (2025). B sequences, T_b tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.ratio import clamped_exp
from mcore_rl.config.algorithm import CorrectionConfig, Denominator, SequenceCorrection, TokenCorrection


@dataclass(frozen=True)
class Correction:
    """scale: B fp32 [T_b], factor of the policy term. keep: B bool [T_b], trained and neither dropped nor rejected."""

    scale: tuple[Tensor, ...]
    keep: tuple[Tensor, ...]
    metrics: dict[str, float]


def correct(
    old: Sequence[Tensor],
    sampler: Sequence[Tensor],
    masks: Sequence[Tensor],
    config: CorrectionConfig,
    *,
    sequence_ratio: bool = False,
) -> Correction:
    """Factors and survivors of one update. old: pi'; sampler: mu; both B tensors [T_b] of log-probs.

    sequence_ratio: whether the ratio is a length-normalised sequence's; what is logged of the weights depends on it.
    ValueError when a mismatch is not finite at a trained token or no token is trained.
    """
    gaps = [
        torch.where(mask, ours.double() - theirs.double(), 0.0) for ours, theirs, mask in zip(old, sampler, masks, strict=True)
    ]
    _check(gaps, masks)
    weights = [clamped_exp(gap) for gap in gaps]
    sums = torch.stack([gap.sum() for gap in gaps])
    lengths = torch.tensor([float(mask.sum()) for mask in masks])
    accepted = _accepted(sums, lengths, config)
    keep = tuple(
        mask & accepted[i] & _inside(weight, config) for i, (mask, weight) in enumerate(zip(masks, weights, strict=True))
    )
    scale = tuple(_factor(weight, config).to(torch.float32) for weight in weights)
    carried = _carried(gaps, weights, keep, sequence_ratio=sequence_ratio, config=config)
    effective = [torch.where(k, s * c, 0.0)[m] for m, k, s, c in zip(masks, keep, scale, carried, strict=True)]
    metrics = {
        "correction/ess_frac": _effective_share(torch.cat(effective)),
        **_metrics(weights, masks, keep, sums, accepted, config),
    }
    return Correction(scale, keep, metrics)


def _check(gaps: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    flat, trained = torch.cat(list(gaps)), sum(int(mask.sum()) for mask in masks)
    bad = int((~flat.isfinite()).sum())
    if bad or not trained:
        raise ValueError(f"correction: {bad} of {trained} trained tokens have no finite log-prob from both engines")


def _accepted(sums: Tensor, lengths: Tensor, config: CorrectionConfig) -> Tensor:
    """bool [B]."""
    if config.sequence is SequenceCorrection.none:
        return torch.ones_like(sums, dtype=torch.bool)
    size = sums if config.sequence is SequenceCorrection.sum else sums / lengths.clamp_min(1.0)
    return size.abs() <= config.sequence_max_nats


def _inside(weight: Tensor, config: CorrectionConfig) -> Tensor:
    if config.token is not TokenCorrection.mask:
        return torch.ones_like(weight, dtype=torch.bool)
    return (weight >= config.token_floor) & (weight <= config.token_cap)


def _factor(weight: Tensor, config: CorrectionConfig) -> Tensor:
    """The constant that multiplies the policy term; see the table above."""
    trainer = config.denominator is Denominator.trainer
    if config.token is TokenCorrection.truncate:
        return weight.clamp_max(config.token_cap) if trainer else (config.token_cap / weight).clamp_max(1.0)
    if config.token is TokenCorrection.mask:
        return weight if trainer else torch.ones_like(weight)
    return torch.ones_like(weight)


def _carried(
    gaps: Sequence[Tensor], weights: Sequence[Tensor], keep: Sequence[Tensor], *, sequence_ratio: bool, config: CorrectionConfig
) -> list[Tensor]:
    """What the ratio itself weighs a token with at the sampling weights."""
    if config.denominator is Denominator.trainer:
        return [torch.ones_like(weight) for weight in weights]
    if not sequence_ratio:
        return list(weights)
    means = [torch.where(kept, gap, 0.0).sum() / kept.sum().clamp_min(1) for gap, kept in zip(gaps, keep, strict=True)]
    return [clamped_exp(mean).expand_as(weight) for mean, weight in zip(means, weights, strict=True)]


def _effective_share(effective: Tensor) -> float:
    """(sum v)^2 / (n sum v^2) of the tokens' effective weights v; NaN where all are 0."""
    square = float(effective.double().square().sum()) * effective.numel()
    return float(effective.double().sum()) ** 2 / square if square else math.nan


def _metrics(
    weights: Sequence[Tensor],
    masks: Sequence[Tensor],
    keep: Sequence[Tensor],
    sums: Tensor,
    accepted: Tensor,
    config: CorrectionConfig,
) -> dict[str, float]:
    """rejected_frac: of the responses with a token."""
    mask = torch.cat(list(masks))
    weight, kept = torch.cat(list(weights))[mask], torch.cat(list(keep))[mask]
    responses = torch.tensor([bool(one.any()) for one in masks])
    beyond = weight > config.token_cap
    if config.token is TokenCorrection.mask:
        beyond = beyond | (weight < config.token_floor)
    return {
        "correction/rejected_frac": float((responses & ~accepted).sum()) / float(responses.sum()),
        "correction/token_beyond_frac": float(beyond.double().mean()),
        "correction/kept_token_frac": float(kept.double().mean()),
        "correction/weight_mean": float(weight.mean()),
        "correction/weight_max": float(weight.max()),
        "correction/delta_seq_max_abs_nats": float(sums[responses].abs().max()),
        "correction/delta_seq_mean_abs_nats": float(sums[responses].abs().mean()),
    }
