"""How a configuration is refused: one line, the setting and why."""

from __future__ import annotations

import math
from collections.abc import Iterable


def require(ok: bool, setting: str, why: str) -> None:
    """ValueError `setting: why` unless ok."""
    if not ok:
        raise ValueError(f"{setting}: {why}")


def at_least(least: int, values: Iterable[tuple[str, int]]) -> None:
    """Each (key, value) is at least `least`."""
    for key, value in values:
        require(value >= least, f"{key}={value}", f"must be at least {least}")


MAX_DRAWN_PROMPTS = 100_000


def drawable(values: Iterable[tuple[str, int]]) -> None:
    """Each (key, value) is at most so many prompts as are drawn before a run starts."""
    for key, value in values:
        most = f"at most {MAX_DRAWN_PROMPTS:,}: every one is drawn before the run starts"
        require(value <= MAX_DRAWN_PROMPTS, f"{key}={value}", most)


def positive(values: Iterable[tuple[str, float]]) -> None:
    """Each (key, value) is finite and above 0."""
    for key, value in values:
        require(math.isfinite(value) and value > 0.0, f"{key}={value}", "must be positive")


def shares(values: Iterable[tuple[str, float]]) -> None:
    """Each (key, value) lies in [0, 1]."""
    for key, value in values:
        require(0.0 <= value <= 1.0, f"{key}={value}", "a share in [0, 1] is needed")
