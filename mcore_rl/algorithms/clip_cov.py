"""Clip-Cov: the policy term of a few tokens of high covariance between log-prob and advantage is switched off.

cov_t = (A_t - mean A) (log pi_t - mean log pi), means over the trained tokens of the whole update (not of a micro-batch).
A token may be chosen when low < cov_t < high and the two-sided clip has not cut it already. Of those, N =
max(int(fraction x trained tokens), 1) are drawn at random, keyed by token (`keyed.py`); a chosen token's policy term is 0,
and it still counts in every denominator. Source: arXiv 2505.22617, with statistics made global. B sequences, T_b tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.clip import clipped_objective
from mcore_rl.algorithms.keyed import token_uniforms
from mcore_rl.algorithms.ratio import token_ratio
from mcore_rl.config.algorithm import AlgorithmConfig


@dataclass(frozen=True)
class ClipCovInputs:
    """One whole update: per-token tensors [T_b] of B sequences. current: at the weights about to be updated.

    old None: current is its own old. seed, step: with the sample id and the token index they key the draw.
    """

    current: Sequence[Tensor]
    old: Sequence[Tensor] | None
    advantages: Sequence[Tensor]
    masks: Sequence[Tensor]
    sample_ids: Sequence[str]
    seed: int
    step: int


@dataclass(frozen=True)
class ClipCovChoice:
    """keep: B fp32 [T_b], 0 at the chosen tokens and 1 elsewhere. metrics: clip_cov/*."""

    keep: tuple[Tensor, ...]
    metrics: dict[str, float]


def choose_tokens(inputs: ClipCovInputs, config: AlgorithmConfig) -> ClipCovChoice:
    """The tokens whose policy term is switched off in this update. ValueError when no token is trained."""
    mask = torch.cat(list(inputs.masks))
    trained = int(mask.sum())
    if trained == 0:
        raise ValueError("clip_cov: no token is trained in this update")
    current = torch.cat(list(inputs.current)).double()
    advantage = torch.cat(list(inputs.advantages)).double()
    covariance = _covariance(current, advantage, mask)
    eligible = mask & (covariance > config.clip_cov.low) & (covariance < config.clip_cov.high)
    if inputs.old is not None:
        eligible &= ~_cut(current, torch.cat(list(inputs.old)).double(), advantage, mask, config)
    quota = max(int(config.clip_cov.fraction * trained), 1)
    chosen = _draw(eligible, quota, inputs)
    lengths = [one.numel() for one in inputs.masks]
    keep = torch.split((~chosen).to(torch.float32), lengths)
    return ClipCovChoice(keep, _metrics(covariance, mask, eligible, chosen, advantage))


def _covariance(current: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """float64; 0 where not trained."""
    current, advantage = torch.where(mask, current, 0.0), torch.where(mask, advantage, 0.0)
    trained = mask.sum()
    return torch.where(mask, (advantage - advantage.sum() / trained) * (current - current.sum() / trained), 0.0)


def _cut(current: Tensor, old: Tensor, advantage: Tensor, mask: Tensor, config: AlgorithmConfig) -> Tensor:
    ratio = token_ratio(torch.where(mask, current - old, 0.0))
    return clipped_objective(ratio, advantage, low=config.clip_low, high=config.clip_high)[1]


def _draw(eligible: Tensor, quota: int, inputs: ClipCovInputs) -> Tensor:
    """The `quota` eligible tokens of the smallest keyed numbers: no other token has a say in a token's number."""
    drawn = torch.full(eligible.shape, math.inf, dtype=torch.float64)
    start = 0
    for name, mask in zip(inputs.sample_ids, inputs.masks, strict=True):
        cut = slice(start, start + mask.numel())
        start += mask.numel()
        if eligible[cut].any():
            numbers = token_uniforms(inputs.seed, inputs.step, name, mask.numel())
            drawn[cut] = torch.where(eligible[cut], numbers, math.inf)
    chosen = torch.zeros_like(eligible)
    chosen[drawn.argsort()[: min(quota, int(eligible.sum()))]] = True
    return chosen


def _metrics(covariance: Tensor, mask: Tensor, eligible: Tensor, chosen: Tensor, advantage: Tensor) -> dict[str, float]:
    trained, selected = float(mask.sum()), float(chosen.sum())
    return {
        "clip_cov/cov_mean": float(covariance[mask].mean()),
        "clip_cov/cov_max": float(covariance[mask].max()),
        "clip_cov/n_eligible": float(eligible.sum()),
        "clip_cov/n_selected": selected,
        "clip_cov/effective_ratio": selected / trained,
        "clip_cov/sel_posA_frac": float((advantage[chosen] > 0).sum()) / selected if selected else math.nan,
    }
