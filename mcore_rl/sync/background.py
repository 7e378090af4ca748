"""Calls on daemon threads: a run that is interrupted does not wait for an engine that hangs."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


def attempt(call: Callable[[], T]) -> T | Exception:
    """The call's result, or the error it ended with."""
    try:
        return call()
    except (RuntimeError, ValueError, TypeError, LookupError, OSError, AssertionError, AttributeError, MemoryError) as failure:
        return failure


class Background(Generic[T]):
    """One call, begun at once."""

    def __init__(self, call: Callable[[], T], name: str) -> None:
        """name: of the thread."""
        # Counts as failed until it has succeeded, so that no way of ending can pass for a result.
        self._outcome: T | Exception = RuntimeError(f"{name} ended without a result")
        self._call = call
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def outcome(self) -> T | Exception:
        """Wait until it has ended; its result or its error."""
        self._thread.join()
        return self._outcome

    def result(self) -> T:
        """Wait until it has ended; its result, or its error raised."""
        outcome = self.outcome()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def _run(self) -> None:
        try:
            self._outcome = attempt(self._call)
        except Exception as odd:  # told to who waits and, with its traceback, by the thread
            self._outcome = odd
            raise
