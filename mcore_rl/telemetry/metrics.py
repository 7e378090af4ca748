"""A number that knows how to be combined with the same number from another micro-batch, update or rank.

A mean of means is wrong wherever the parts differ in size, so the weight travels with the value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class Reducer(str, Enum):
    """How parts become one: weighted mean, sum, smallest, largest, or the one given last."""

    MEAN = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    """value and its reducer; weight counts for MEAN only (tokens, sequences, prompts behind the value)."""

    value: float
    reducer: Reducer
    weight: float = 1.0


def mean(value: float, weight: float = 1.0) -> Metric:
    """A mean over `weight` items."""
    return Metric(value, Reducer.MEAN, weight)


def total(value: float) -> Metric:
    """A count or sum: parts add up."""
    return Metric(value, Reducer.SUM)


def smallest(value: float) -> Metric:
    """A minimum."""
    return Metric(value, Reducer.MIN)


def largest(value: float) -> Metric:
    """A maximum."""
    return Metric(value, Reducer.MAX)


def last(value: float) -> Metric:
    """A state: the newest counts."""
    return Metric(value, Reducer.LAST)


def combine(parts: Sequence[Mapping[str, Metric]]) -> dict[str, float]:
    """One value per name over all parts that have it, in order of first appearance.

    NaN in any part stays NaN. Raises ValueError when parts disagree on a name's reducer.
    """
    collected: dict[str, list[Metric]] = {}
    for part in parts:
        for name, metric in part.items():
            collected.setdefault(name, []).append(metric)
    return {name: _reduce(name, metrics) for name, metrics in collected.items()}


def _reduce(name: str, metrics: list[Metric]) -> float:
    kinds = {metric.reducer for metric in metrics}
    if len(kinds) > 1:
        raise ValueError(f"metric {name}: reducers differ between parts: {', '.join(sorted(kind.value for kind in kinds))}")
    return _REDUCE[metrics[0].reducer](metrics)


def _mean(metrics: list[Metric]) -> float:
    weight = sum(metric.weight for metric in metrics)
    if weight == 0:
        return math.nan
    return sum(metric.value * metric.weight for metric in metrics if metric.weight != 0) / weight


def _extreme(pick: Callable[[Iterable[float]], float]) -> Callable[[list[Metric]], float]:
    def reduce(metrics: list[Metric]) -> float:
        values = [metric.value for metric in metrics]
        return math.nan if any(math.isnan(value) for value in values) else pick(values)

    return reduce


_REDUCE: dict[Reducer, Callable[[list[Metric]], float]] = {
    Reducer.MEAN: _mean,
    Reducer.SUM: lambda metrics: sum(metric.value for metric in metrics),
    Reducer.MIN: _extreme(min),
    Reducer.MAX: _extreme(max),
    Reducer.LAST: lambda metrics: metrics[-1].value,
}
