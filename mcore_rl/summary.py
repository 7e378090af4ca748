"""summary.json: the run in a dozen numbers, from its metric rows and evaluations; also when it failed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.run_folder import RunFolder, write_json
from mcore_rl.telemetry.jsonl import encode, read_rows

COMPLETED = "completed"


@dataclass(frozen=True)
class EvalSummary:
    """What the held-out evaluations gave; None where one did not run.

    accuracy_*: greedy, accuracy_*_t1: at temperature 1, in [0, 1]. ci95_half_width: of accuracy_after (or of
    accuracy_before while there is no other). paired_gain_ci95_low: lower end of the paired bootstrap interval.
    """

    accuracy_before: float | None = None
    accuracy_after: float | None = None
    ci95_half_width: float | None = None
    paired_gain_ci95_low: float | None = None
    accuracy_before_t1: float | None = None
    accuracy_after_t1: float | None = None
    eval_n: int | None = None


def build_summary(
    rows: Sequence[Mapping[str, Any]],
    evals: EvalSummary,
    *,
    exit_reason: str,
    seconds_by_stage: Mapping[str, float] | None = None,
    extra: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """The summary of a run with these metric rows (one per step, in order).

    A number that does not exist is null, never 0. seconds_by_stage: totals of the whole run where they are known
    (warm-up, evaluation and export included); otherwise the sums over the rows.
    """
    deltas = _series(rows, "delta_mean_abs_nats")
    quarter = max(1, len(deltas) // 4)
    summary: dict[str, Any] = {
        **vars(evals),
        "steps": len(rows),
        "delta_mean_abs_first_quarter_nats": _mean(deltas[:quarter]),
        "delta_mean_abs_last_quarter_nats": _mean(deltas[-quarter:]),
        "delta_max_abs_nats": _peak(_series(rows, "delta_max_abs_nats")),
        "seconds_by_stage": dict(seconds_by_stage) if seconds_by_stage is not None else _seconds(rows),
        "exit_reason": exit_reason,
    }
    return {**summary, **(extra or {})}


def write_summary(folder: RunFolder, summary: Mapping[str, Any]) -> None:
    """Write summary.json; numbers that are not finite become their names, as in metrics.jsonl."""
    encoded = encode(dict(summary))
    if isinstance(encoded, dict):
        write_json(folder.summary, encoded)


def summarise_failure(folder: RunFolder, exit_reason: str) -> None:
    """Put the launcher's verdict in summary.json: it saw all ranks, rank 0 may only have noticed that a peer was gone.

    What rank 0 wrote itself is kept under exit_reason_rank0. A run that wrote no summary gets one from metrics.jsonl.
    """
    if folder.summary.exists():
        written = json.loads(folder.summary.read_text(encoding="utf-8"))
        write_json(folder.summary, {**written, "exit_reason": exit_reason, "exit_reason_rank0": written.get("exit_reason")})
        return
    rows = read_rows(folder.metrics) if folder.metrics.exists() else []
    write_summary(folder, build_summary(rows, EvalSummary(), exit_reason=exit_reason))


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [float(row[name]) for row in rows if name in row]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _peak(values: Sequence[float]) -> float | None:
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=None)


def _seconds(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith("seconds/"):
                stage = name.removeprefix("seconds/")
                totals[stage] = totals.get(stage, 0.0) + float(value)
    return totals
