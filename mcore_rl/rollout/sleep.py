"""Engines that give their GPU memory back while the trainer works, and when they may sample again.

Level 1 keeps the weights in host memory: after waking the engine is what it was. Level 2 drops them: after waking it holds
nothing until a complete sync has been proved. A partial sync does not count, and neither does waking alone.
"""

from __future__ import annotations

from typing import Protocol

from mcore_rl.types import StaleRollout

LEVELS = (0, 1, 2)


class Sleeper(Protocol):
    """What can sleep: a link to an engine."""

    def sleep(self, level: int) -> None:
        """Give the memory back."""
        ...

    def wake(self) -> None:
        """Take it again."""
        ...


def check_level(level: int, *, cuda: bool) -> None:
    """ValueError for a level that there is not, or that this device has not."""
    if level not in LEVELS:
        raise ValueError(f"rollout.sleep_level={level}: one of 0 (never), 1 (weights kept), 2 (weights dropped)")
    if level and not cuda:
        raise ValueError(f"rollout.sleep_level={level}: engines on a CPU cannot sleep; use 0")


class SleepCycle:
    """awake -> asleep -> awake, for one engine. Twice to sleep or twice awake is one time."""

    def __init__(self, sleeper: Sleeper, level: int) -> None:
        """level 0: every call does nothing."""
        self._sleeper = sleeper
        self._level = level
        self._asleep = False
        self._empty = False

    @property
    def empty(self) -> bool:
        """Whether its weights were dropped and no complete sync has followed."""
        return self._empty

    def rest(self) -> None:
        """Sleep, where a level is set."""
        if self._level and not self._asleep:
            self._sleeper.sleep(self._level)
            self._asleep = True
            self._empty = self._empty or self._level == max(LEVELS)

    def wake(self) -> None:
        """Wake up; at level 2 still without weights."""
        if self._asleep:
            self._sleeper.wake()
            self._asleep = False

    def proved(self) -> None:
        """A complete sync has been proved. StaleRollout when it was made asleep, which cannot be."""
        if self._asleep:
            raise StaleRollout("a sync was proved while the engine slept")
        self._empty = False

    def require_usable(self, name: str) -> None:
        """StaleRollout when the engine sleeps, or woke up without weights."""
        if self._asleep:
            raise StaleRollout(f"{name} sleeps: wake it before it samples")
        if self._empty:
            raise StaleRollout(f"{name} dropped its weights when it slept: a complete weight sync must come first")
