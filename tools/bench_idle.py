"""Benchmarks start on an idle machine, or say that they did not."""

from __future__ import annotations

import os
import time

BUSY_LOAD = 0.5
WAIT_S = 240.0
_POLL_S = 5.0


def settled_load() -> float:
    """The load average of the last minute, once it is below BUSY_LOAD, or as it is after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while os.getloadavg()[0] > BUSY_LOAD and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return os.getloadavg()[0]


def say_if_busy(load: float) -> None:
    """A line above figures that were taken on a busy machine."""
    if load > BUSY_LOAD:
        print(f"NOT VALID: the machine was busy before the start (load average {load:.1f}); run again when it is idle")
