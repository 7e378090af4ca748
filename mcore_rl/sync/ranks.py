"""The trainer's ranks as a sync sees them; a single process without a process group is a trainer of one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch.distributed as dist

from parallel.collectives import gather_builtins, on_rank0, together

T = TypeVar("T")


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def is_rank0() -> bool:
    """Whether this rank is the one that talks to the engine."""
    return _alone() or dist.get_rank() == 0


def all_or_none() -> AbstractContextManager[None]:
    """What is inside succeeds on every rank or raises on every rank. Collective."""
    return nullcontext() if _alone() else together()


def gather(value: T) -> list[T]:
    """Every rank's value (builtins) in rank order. Collective."""
    return [value] if _alone() else gather_builtins(value)


def from_rank0(function: Callable[[], T]) -> T:
    """Rank 0's result (builtins) on every rank; its exception too. Collective."""
    return function() if _alone() else on_rank0(function)
