"""Seconds per stage of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class StageClock:
    """Adds up wall-clock seconds by stage name, for the current step and for the whole run."""

    step_s: dict[str, float] = field(default_factory=dict)
    total_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time the body under `name`, also when it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Count `seconds` to `name`."""
        self.step_s[name] = self.step_s.get(name, 0.0) + seconds
        self.total_s[name] = self.total_s.get(name, 0.0) + seconds

    def take_step(self) -> dict[str, float]:
        """Seconds by stage since the last call; the run's totals stay."""
        taken, self.step_s = self.step_s, {}
        return taken
