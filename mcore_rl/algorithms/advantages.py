"""Advantages within groups of samples of one prompt occurrence.

Groups are formed by prompt_id, never by position. All arithmetic is float64; a group whose rewards are all the same
value gets exactly 0 (found by comparing values: in floating point its standard deviation need not be 0).
Sources: GRPO arXiv 2402.03300 (mean and std), Dr. GRPO arXiv 2503.20783 (mean only), RLOO arXiv 2402.14740,
MC-GRPO arXiv 2601.22582 (median).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.config.algorithm import Baseline

STD_EPS = 1e-6
MAD_TO_STD = 1.4826
"""Median absolute deviation of a normal distribution -> its standard deviation."""


@dataclass(frozen=True)
class Advantages:
    """values: fp32 [B]. Counts of groups that teach nothing, and why: one reward value, or one sample."""

    values: Tensor
    groups: int
    zero_variance_groups: int
    singleton_groups: int


def group_mean(rewards: Tensor) -> Tensor:
    """r - mean(r) of one group, float64 [G]; exactly 0 when all rewards are equal (a single sample included)."""
    return torch.zeros_like(rewards) if _unanimous(rewards) else rewards - rewards.mean()


def group_mean_std(rewards: Tensor, *, ddof: int, eps: float = STD_EPS) -> Tensor:
    """(r - mean(r)) / (std(r, ddof) + eps) of one group, float64 [G]; exactly 0 when all rewards are equal."""
    if ddof not in (0, 1):
        raise ValueError(f"algorithm.ddof={ddof}: 0 (population) or 1 (sample) is needed")
    if _unanimous(rewards):
        return torch.zeros_like(rewards)
    return (rewards - rewards.mean()) / (rewards.std(correction=ddof) + eps)


def leave_one_out(rewards: Tensor) -> Tensor:
    """r_i - mean of the others, float64 [G]; exactly 0 when all rewards are equal (a single sample included)."""
    if _unanimous(rewards):
        return torch.zeros_like(rewards)
    return rewards - (rewards.sum() - rewards) / (rewards.numel() - 1)


def median_mad(rewards: Tensor, *, ddof: int, eps: float = STD_EPS) -> Tensor:
    """(r - median(r)) / (1.4826 median|r - median(r)| + eps) of one group, float64 [G]; 0 when all rewards are equal.

    The median of an even group is the mean of its two middle values. Where more than half of the rewards are equal the
    deviation's median is 0 although the group is mixed (one right answer of eight): the standard deviation stands in.
    """
    if _unanimous(rewards):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.quantile(0.5)
    spread = MAD_TO_STD * centred.abs().quantile(0.5)
    if not spread > 0.0:
        spread = rewards.std(correction=ddof)
    return centred / (spread + eps)


def compute_advantages(
    rewards: Sequence[float | None],
    prompt_ids: Sequence[str],
    sample_ids: Sequence[str],
    *,
    baseline: Baseline,
    ddof: int,
) -> Advantages:
    """Advantage of every sample. ValueError names the sample whose reward is None, NaN or infinite."""
    values = checked_rewards(rewards, sample_ids)
    groups = group_indices(prompt_ids)
    out = values.clone()
    for index in groups.values():
        if baseline is not Baseline.none:
            out[index] = _centred(values[index], baseline, ddof)
    return Advantages(
        values=out.to(torch.float32),
        groups=len(groups),
        zero_variance_groups=sum(_unanimous(values[index]) for index in groups.values()),
        singleton_groups=sum(len(index) == 1 for index in groups.values()),
    )


def group_indices(prompt_ids: Sequence[str]) -> dict[str, list[int]]:
    """prompt_id -> positions of its samples, in order of first appearance."""
    groups: dict[str, list[int]] = {}
    for position, prompt_id in enumerate(prompt_ids):
        groups.setdefault(prompt_id, []).append(position)
    return groups


def checked_rewards(rewards: Sequence[float | None], sample_ids: Sequence[str]) -> Tensor:
    """Rewards as float64 [B]; ValueError names the first sample without a finite one."""
    checked: list[float] = []
    for reward, sample_id in zip(rewards, sample_ids, strict=True):
        if reward is None or not math.isfinite(reward):
            raise ValueError(f"sample {sample_id}: reward is {reward}; a finite number is needed")
        checked.append(float(reward))
    return torch.tensor(checked, dtype=torch.float64)


def _unanimous(rewards: Tensor) -> bool:
    return bool((rewards == rewards[0]).all())


def _centred(rewards: Tensor, baseline: Baseline, ddof: int) -> Tensor:
    if baseline is Baseline.group_mean:
        return group_mean(rewards)
    if baseline is Baseline.leave_one_out:
        return leave_one_out(rewards)
    if baseline is Baseline.median_mad:
        return median_mad(rewards, ddof=ddof)
    return group_mean_std(rewards, ddof=ddof)
