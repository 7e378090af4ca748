"""What the rewards of a batch say about themselves: failures by reason, and how much each component really varies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mcore_rl.types import Score

# Why a reward call gave no reward: no answer in time, the process ended, the function raised.
FAILURES = ("timeout", "crash", "error")


def failure_counts(scores: Sequence[Score]) -> dict[str, float]:
    """`drop/reward_<reason>`: samples without a reward, by reason; always present, so that 0 is a statement."""
    return {f"drop/reward_{reason}": float(sum(score.failure == reason for score in scores)) for reason in FAILURES}


def component_statistics(scores: Sequence[Score]) -> dict[str, float]:
    """Mean and population std of every component over the samples that have it.

    The spread, not the coefficient, says what a policy is really trained on.
    """
    names = dict.fromkeys(name for score in scores for name in score.components)
    found: dict[str, float] = {}
    for name in names:
        values = [score.components[name] for score in scores if name in score.components]
        mean = math.fsum(values) / len(values)
        spread = 0.0 if len(set(values)) == 1 else math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))
        found[f"reward_component_mean/{name}"] = mean
        found[f"reward_component_std/{name}"] = spread
    return found
