"""What a loss function counts on its row: sums and extremes that add up over micro-batches and ranks."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossStats:
    """Sums over the units that a clip was applied to (tokens or sequences), and over trained tokens.

    active: units with a nonzero advantage. clipped: active units that the clip acted on; clipped_high: those with A > 0.
    tokens: trained tokens. ratio_kl: sum of r - 1 - log r over them. pg_positive, pg_negative: weighted policy loss of
    tokens with A > 0 and A < 0. reference_tokens, kl_k1, kl_k3: tokens with a reference, and the estimators' sums.
    teacher_tokens, teacher_kl, outside_k: tokens with a teacher, their reverse KL (nats), their mass outside its K choices.
    """

    clipped: float = 0.0
    clipped_high: float = 0.0
    active: float = 0.0
    count: float = 0.0
    total: float = 0.0
    tokens: float = 0.0
    ratio_kl: float = 0.0
    pg_positive: float = 0.0
    pg_negative: float = 0.0
    reference_tokens: float = 0.0
    kl_k1: float = 0.0
    kl_k3: float = 0.0
    teacher_tokens: float = 0.0
    teacher_kl: float = 0.0
    outside_k: float = 0.0
    largest: float = -math.inf
    negated_smallest: float = -math.inf

    def sums(self) -> list[float]:
        """The fields that add up."""
        return list(astuple(self)[:-2])

    def extremes(self) -> list[float]:
        """The fields of which the largest counts."""
        return [self.largest, self.negated_smallest]

    @classmethod
    def from_parts(cls, sums: list[float], extremes: list[float]) -> LossStats:
        """The inverse of `sums` and `extremes`."""
        return cls(*sums, *extremes)

    def merge(self, other: LossStats) -> LossStats:
        """Both together."""
        sums = [a + b for a, b in zip(self.sums(), other.sums(), strict=True)]
        return LossStats.from_parts(sums, [max(a, b) for a, b in zip(self.extremes(), other.extremes(), strict=True)])

    def metrics(self) -> dict[str, float]:
        """Names as they are logged; NaN where there was no unit. Those of a reference or a teacher are there with it.

        clip_frac, clip_frac_high, clip_frac_low: over active units. ratio_min, ratio_mean, ratio_max: over all.
        pg_skew: (P + N) / (|P| + |N|) of the two losses, 0 when rise and fall balance; a ratio KL cannot see it move.
        """
        if self.teacher_tokens and not self.count:  # distillation has no ratio, clip or advantage
            return self._teacher()
        size = abs(self.pg_positive) + abs(self.pg_negative)
        found = {
            "clip_frac": _share(self.clipped, self.active),
            "clip_frac_high": _share(self.clipped_high, self.active),
            "clip_frac_low": _share(self.clipped - self.clipped_high, self.active),
            "ratio_min": -self.negated_smallest if self.count else math.nan,
            "ratio_mean": _share(self.total, self.count),
            "ratio_max": self.largest if self.count else math.nan,
            "ratio_kl_nats": _share(self.ratio_kl, self.tokens),
            "pg_positive_adv": self.pg_positive,
            "pg_negative_adv": self.pg_negative,
            "pg_skew": _share(self.pg_positive + self.pg_negative, size),
        }
        if self.reference_tokens:
            found["kl_k1_nats"] = self.kl_k1 / self.reference_tokens
            found["kl_k3_nats"] = self.kl_k3 / self.reference_tokens
        return found

    def _teacher(self) -> dict[str, float]:
        return {
            "teacher_kl_nats": self.teacher_kl / self.teacher_tokens,
            "mass_outside_teacher_k": self.outside_k / self.teacher_tokens,
        }


def measured(sums: dict[str, Tensor], chosen: Tensor) -> LossStats:
    """Stats from named scalar tensors and the ratios `chosen` of the units; one transfer from the device."""
    names = [field.name for field in fields(LossStats)][:-2]
    zero = torch.zeros((), dtype=torch.float64, device=chosen.device)
    some = chosen.numel() > 0
    extremes = [chosen.max().double(), -chosen.min().double()] if some else [zero - math.inf] * 2
    vector = torch.stack([sums[name].double() if name in sums else zero for name in names] + extremes)
    return LossStats(*(float(part) for part in vector.cpu()))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
