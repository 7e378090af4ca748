"""metrics.jsonl and rollouts.jsonl in the run folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.telemetry.jsonl import dump_line


class JsonlSink:
    """One line per step in metrics.jsonl, one per completion in rollouts.jsonl; each line is flushed when written.

    A rollout file stops growing at `max_rollouts` records; how many were left out is written by `close`.
    """

    def __init__(self, folder: Path, *, max_rollouts: int = 1_000_000) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._rollouts = (folder / "rollouts.jsonl").open("a", encoding="utf-8")
        self._room = max_rollouts
        self._left_out = 0

    def log_step(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """Append the step's row. ValueError naming a metric that is no number (None is a lost value, never a gap)."""
        for name, value in metrics.items():
            items = value if isinstance(value, list) else [value]
            if any(isinstance(item, bool) or not isinstance(item, int | float) for item in items):
                raise ValueError(f"metric {name} at step {step} is {value!r}; only numbers and lists of numbers are logged")
        self._metrics.write(dump_line({"step": step, **metrics}) + "\n")
        self._metrics.flush()

    def log_rollouts(self, step: int, records: Sequence[dict[str, object]]) -> None:
        """Append one line per completion while there is room."""
        kept = records[: self._room]
        self._rollouts.writelines(dump_line({"step": step, **record}) + "\n" for record in kept)
        self._rollouts.flush()
        self._room -= len(kept)
        self._left_out += len(records) - len(kept)

    def close(self) -> None:
        """Flush, say how many rollouts were left out, close. Twice is fine."""
        if self._rollouts.closed:
            return
        if self._left_out:
            self._rollouts.write(dump_line({"rollouts_left_out": self._left_out}) + "\n")
        self._rollouts.close()
        self._metrics.close()
