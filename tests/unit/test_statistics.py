"""Intervals against scipy and against hand-made cases."""

import math

import pytest
from scipy.stats import binomtest

from mcore_rl.statistics import paired_bootstrap, wilson_half_width, wilson_interval


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (5, 10), (10, 10), (195, 1000), (272, 500), (1, 1)])
def test_wilson_equals_scipy(successes, n):
    reference = binomtest(successes, n).proportion_ci(method="wilson")
    low, high = wilson_interval(successes, n)
    assert (low, high) == pytest.approx((reference.low, reference.high), abs=1e-12)
    assert wilson_half_width(successes, n) == pytest.approx((reference.high - reference.low) / 2, abs=1e-12)


@pytest.mark.parametrize(("successes", "n"), [(1, 0), (-1, 5), (6, 5)])
def test_wilson_refuses(successes, n):
    with pytest.raises(ValueError, match=f"n={n}"):
        wilson_interval(successes, n)


def test_bootstrap_is_paired():
    """Identical answers give exactly nothing, however mixed; a prompt-wise constant gain has no width."""
    mixed = [0, 1] * 250
    same = paired_bootstrap(mixed, mixed)
    assert (same.mean, same.low, same.high, same.n) == (0.0, 0.0, 0.0, 500)
    all_gained = paired_bootstrap([0] * 500, [1] * 500)
    assert (all_gained.mean, all_gained.low, all_gained.high) == (1.0, 1.0, 1.0)


def test_bootstrap_width_is_that_of_the_mean():
    """n = 1000, gains +1 (500), 0 (300), -1 (200): mean 0.3, sd sqrt(0.7 - 0.09), normal interval 0.3 +- 1.96 sd / sqrt(n)."""
    before, after = [0] * 500 + [1] * 300 + [1] * 200, [1] * 500 + [1] * 300 + [0] * 200
    gain = paired_bootstrap(before, after, samples=10_000, seed=1)
    half = 1.96 * math.sqrt(0.7 - 0.09) / math.sqrt(1000)
    assert gain.mean == pytest.approx(0.3)
    assert gain.low == pytest.approx(0.3 - half, abs=0.004)
    assert gain.high == pytest.approx(0.3 + half, abs=0.004)


def test_bootstrap_is_seeded():
    before, after = [0, 1, 0, 0, 1, 0], [1, 1, 0, 1, 0, 1]
    assert paired_bootstrap(before, after, seed=5) == paired_bootstrap(before, after, seed=5)


@pytest.mark.parametrize(("before", "after"), [([], []), ([1], [1, 0])])
def test_bootstrap_refuses(before, after):
    with pytest.raises(ValueError, match=f"{len(before)} before, {len(after)} after"):
        paired_bootstrap(before, after)
