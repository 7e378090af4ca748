"""The trainer's ranks as a sync sees them; a single process without a process group is a trainer of one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Timer
from typing import TypeVar

import torch.distributed as dist

from mcore_rl.errors import WeightMismatch
from parallel.collectives import gather_builtins, on_rank0, together

T = TypeVar("T")

_FREE_AFTER_S = 30.0


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def is_rank0() -> bool:
    """Whether this rank is the one that talks to the engine."""
    return _alone() or dist.get_rank() == 0


def all_or_none() -> AbstractContextManager[None]:
    """What is inside succeeds on every rank or raises on every rank. Collective."""
    return nullcontext() if _alone() else together()


@contextmanager
def all_or_end() -> Iterator[None]:
    """As all_or_none, around collectives of the policy's own: a rank that fails in one of them leaves the others waiting
    there, where they cannot hear of it. So its process ends half a minute later, with the error on record, and whoever
    started the ranks ends the others, long before the process group's time-out.
    """
    ending: Timer | None = None
    try:
        with all_or_none():
            try:
                yield
            except WeightMismatch:  # found by a rank that has done its part of the collectives
                raise
            except Exception as failure:
                ending = Timer(_FREE_AFTER_S, _end, [failure])
                ending.daemon = True
                ending.start()
                raise
    finally:
        if ending is not None:
            ending.cancel()


def _end(failure: Exception) -> None:
    """The main thread hangs in a collective that nothing interrupts, so it cannot unwind."""
    sys.excepthook(type(failure), failure, failure.__traceback__)
    sys.stderr.flush()
    os._exit(1)


def gather(value: T) -> list[T]:
    """Every rank's value (builtins) in rank order. Collective."""
    return [value] if _alone() else gather_builtins(value)


def from_rank0(function: Callable[[], T]) -> T:
    """Rank 0's result (builtins) on every rank; its exception too. Collective."""
    return function() if _alone() else on_rank0(function)
