"""The study's figures: read from the runs' own files, summarised over seeds, written as Markdown. No figure is typed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_rl.evaluate import EvalResult, paired_gain
from mcore_rl.statistics import PairedGain
from mcore_rl.telemetry.jsonl import read_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class SeedRun:
    """One variant of one seed. start, after: clean weights, greedy and at temperature 1. rows: one per rollout batch."""

    seed: int
    start: EvalResult
    after: EvalResult
    start_t1: EvalResult
    after_t1: EvalResult
    rows: Sequence[Row]
    stopped: str | None = None

    def gain(self) -> PairedGain:
        """Greedy accuracy after minus before, on the same prompts."""
        return paired_gain(self.start, self.after)

    def gain_t1(self) -> float:
        """The same at temperature 1, as a fraction."""
        return self.after_t1.accuracy - self.start_t1.accuracy

    def third(self, name: str, index: int) -> float:
        """Mean of a metric over the first (0), middle (1) or last (2) third of the batches that were logged."""
        count = len(self.rows)
        part = self.rows[count * index // 3 : count * (index + 1) // 3]
        return mean([float(row[name]) for row in part])

    def over_run(self, name: str, combine: Callable[[Sequence[float]], float]) -> float:
        """A metric combined over the batches in which it has a value; NaN where it has none in any."""
        values = [float(row[name]) for row in self.rows if name in row]
        return combine([value for value in values if not math.isnan(value)])


def read_seed(folder: Path, variant: str, seed: int) -> SeedRun:
    """What a seed's folder holds of a variant (start.json, result.json, metrics.jsonl)."""
    start, result = (json.loads((folder / name).read_text()) for name in ("start.json", f"{variant}/result.json"))
    before, after = start["held_out"], result["held_out"]
    return SeedRun(
        seed=seed,
        start=EvalResult.from_json(before["greedy"]),
        after=EvalResult.from_json(after["greedy"]),
        start_t1=EvalResult.from_json(before["t1"]),
        after_t1=EvalResult.from_json(after["t1"]),
        rows=read_rows(folder / variant / "metrics.jsonl"),
        stopped=result["stopped"],
    )


def mean(values: Sequence[float]) -> float:
    """NaN for nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def largest(values: Sequence[float]) -> float:
    """NaN for nothing."""
    return max(values, default=math.nan)


def size(values: Sequence[float]) -> float:
    """Mean |value|."""
    return mean([abs(value) for value in values])


def spread(values: Sequence[float], style: str) -> str:
    """`mean (seed, seed, seed)`, a dash for what was not measured."""
    shown = ["-" if math.isnan(value) else format(value, style) for value in values]
    known = [value for value in values if not math.isnan(value)]
    return f"{format(mean(known), style)} ({', '.join(shown)})" if known else "-"


def learned(runs: Sequence[SeedRun]) -> str:
    """In how many seeds the whole 95% interval of the gain lies above 0, and in how many below."""
    gains = [run.gain() for run in runs]
    up, down = sum(gain.low > 0.0 for gain in gains), sum(gain.high < 0.0 for gain in gains)
    return f"{up} of {len(gains)}" + (f", {down} fell" if down else "")


Columns = Sequence[tuple[str, Callable[[Sequence[SeedRun]], str]]]


def metric(name: str, style: str, combine: Callable[[Sequence[float]], float] = mean) -> Callable[[Sequence[SeedRun]], str]:
    """A column: the metric combined over the batches, per seed."""
    return lambda runs: spread([run.over_run(name, combine) for run in runs], style)


def third(name: str, index: int, style: str) -> Callable[[Sequence[SeedRun]], str]:
    """A column: the metric's mean over a third of the batches, per seed."""
    return lambda runs: spread([run.third(name, index) for run in runs], style)


LEARNING: Columns = (
    ("greedy after", lambda runs: spread([run.after.accuracy for run in runs], ".3f")),
    ("gain, points", lambda runs: spread([100.0 * run.gain().mean for run in runs], "+.1f")),
    ("gain at T=1, points", lambda runs: spread([100.0 * run.gain_t1() for run in runs], "+.1f")),
    ("seeds that gained", learned),
    ("sampled accuracy, first third", third("accuracy", 0, ".3f")),
    ("middle third", third("accuracy", 1, ".3f")),
    ("last third", third("accuracy", 2, ".3f")),
)
MISMATCH: Columns = (
    ("mean abs delta, nats", metric("delta_mean_abs_nats", ".2g")),
    ("max abs delta, nats", metric("delta_max_abs_nats", ".2g", largest)),
    ("mean abs delta of a response, nats", metric("delta_seq_mean_abs_nats", ".2g")),
    ("ESS of tokens", metric("mismatch_ess_frac", ".3f")),
    ("ESS of responses", metric("mismatch_ess_seq_frac", ".3f")),
    ("outside the clip by mismatch alone", metric("mismatch_outside_clip_frac", ".3f")),
)
MONITORS: Columns = (
    ("ratio KL, 1st update", metric("ratio_kl_nats/update_0", ".1e")),
    ("ratio KL, 2nd update", metric("ratio_kl_nats/update_1", ".1e")),
    ("clipped, 1st", metric("clip_frac/update_0", ".3f")),
    ("clipped, 2nd", metric("clip_frac/update_1", ".3f")),
    ("mean abs skew, 1st", metric("pg_skew/update_0", ".3f", size)),
    ("mean abs skew, 2nd", metric("pg_skew/update_1", ".3f", size)),
    ("rejected responses", metric("correction/rejected_frac/update_0", ".3f")),
    ("ESS after correction", metric("correction/ess_frac/update_0", ".3f")),
)


def table(columns: Columns, runs: Sequence[tuple[str, Sequence[SeedRun]]]) -> str:
    """Markdown: a line per variant (its description, its runs in seed order)."""
    lines = ["| run | " + " | ".join(name for name, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {says} | " + " | ".join(cell(found) for _, cell in columns) + " |" for says, found in runs]
    return "\n".join(lines)


def intervals(runs: Sequence[tuple[str, Sequence[SeedRun]]]) -> str:
    """Markdown: each seed's greedy accuracy before and after, with the paired 95% interval of the gain."""
    lines = ["| run | seed | greedy before | greedy after | gain, points | 95% interval | batches | stopped |", "|---" * 8 + "|"]
    for says, found in runs:
        for run in found:
            gain = run.gain()
            points = f"{100 * gain.mean:+.1f} | [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
            accuracy = f"{run.start.accuracy:.3f} | {run.after.accuracy:.3f}"
            lines.append(f"| {says} | {run.seed} | {accuracy} | {points} | {len(run.rows)} | {run.stopped or 'no'} |")
    return "\n".join(lines)
