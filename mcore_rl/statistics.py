"""Intervals of held-out evaluation: Wilson for one accuracy, paired bootstrap for a difference on the same prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Z_95 = 1.959963984540054
BOOTSTRAP_CHUNK = 1_000


@dataclass(frozen=True)
class PairedGain:
    """Mean of (after - before) over the same prompts and its 95% bootstrap interval, as fractions of 1."""

    mean: float
    low: float
    high: float
    n: int
    bootstrap_samples: int


def wilson_interval(successes: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Score interval of a proportion (Wilson 1927). ValueError unless 0 <= successes <= n and n >= 1."""
    half, z2 = wilson_half_width(successes, n, z), z * z
    centre = (successes / n + z2 / (2 * n)) / (1 + z2 / n)
    return centre - half, centre + half


def wilson_half_width(successes: int, n: int, z: float = Z_95) -> float:
    """Half the width of the Wilson interval."""
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"Wilson interval of successes={successes}, n={n}: need 0 <= successes <= n and n >= 1")
    p, z2 = successes / n, z * z
    return z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n)) / (1 + z2 / n)


def paired_bootstrap(before: Sequence[float], after: Sequence[float], *, samples: int = 10_000, seed: int = 0) -> PairedGain:
    """95% percentile bootstrap of mean(after - before), resampling prompts (Efron 1979). One value per prompt each.

    ValueError when the two do not cover the same prompts or there are none.
    """
    if len(before) != len(after) or not before or samples < 1:
        raise ValueError(f"paired_bootstrap: {len(before)} before, {len(after)} after, samples={samples}; need equal counts >= 1")
    gains = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    rng, means = np.random.default_rng(seed), list[np.ndarray]()
    for start in range(0, samples, BOOTSTRAP_CHUNK):
        count = min(BOOTSTRAP_CHUNK, samples - start)
        means.append(gains[rng.integers(0, len(gains), size=(count, len(gains)))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return PairedGain(float(gains.mean()), float(low), float(high), len(gains), samples)
