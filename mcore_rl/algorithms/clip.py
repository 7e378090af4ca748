"""Clipping of the surrogate objective, and the counts that tell whether it is on the right scale."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RatioStats:
    """Sums over the units (tokens or sequences) that a clip was applied to; add up over micro-batches and ranks.

    active: units with a nonzero advantage. clipped: active units whose objective the clip cut off.
    """

    clipped: float = 0.0
    active: float = 0.0
    count: float = 0.0
    total: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def merge(self, other: RatioStats) -> RatioStats:
        """Both together."""
        return RatioStats(
            self.clipped + other.clipped,
            self.active + other.active,
            self.count + other.count,
            self.total + other.total,
            min(self.smallest, other.smallest),
            max(self.largest, other.largest),
        )

    def metrics(self) -> dict[str, float]:
        """clip_frac over active units; ratio_min, ratio_mean, ratio_max over all. NaN where there was none."""
        some = self.count > 0
        return {
            "clip_frac": self.clipped / self.active if self.active else math.nan,
            "ratio_min": self.smallest if some else math.nan,
            "ratio_mean": self.total / self.count if some else math.nan,
            "ratio_max": self.largest if some else math.nan,
        }


def clipped_objective(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Loss -min(r A, clip(r, 1-low, 1+high) A) and whether the clip cut it (bool), elementwise.

    PPO, arXiv 1707.06347, equation 7, with separate bounds as in DAPO, arXiv 2503.14476.
    """
    free = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    return -torch.minimum(free, bounded), (free > bounded).detach()


def ratio_stats(ratio: Tensor, advantage: Tensor, clipped: Tensor, units: Tensor) -> RatioStats:
    """Statistics over the units where `units` is True."""
    chosen = ratio.detach()[units].double()
    if chosen.numel() == 0:
        return RatioStats()
    active = units & (advantage != 0)
    return RatioStats(
        clipped=float((clipped & active).sum()),
        active=float(active.sum()),
        count=float(chosen.numel()),
        total=float(chosen.sum()),
        smallest=float(chosen.min()),
        largest=float(chosen.max()),
    )
