"""One sink that is several."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from mcore_rl.seams import TelemetrySink


class FanOut:
    """Passes every call to each sink in order. An error in one stops the call: telemetry is never lost silently."""

    def __init__(self, sinks: Sequence[TelemetrySink]) -> None:
        self._sinks = tuple(sinks)

    def log_step(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """Metrics of one step to every sink."""
        for sink in self._sinks:
            sink.log_step(step, metrics)

    def log_rollouts(self, step: int, records: Sequence[dict[str, object]]) -> None:
        """Rollout records to every sink."""
        for sink in self._sinks:
            sink.log_rollouts(step, records)

    def close(self) -> None:
        """Close every sink, the last first, also when one of them raises."""
        with ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)
