"""What makes a rank die well: its reason on record in one line, its traceback in the log, and never without its launcher."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from mcore_rl.errors import EngineDied, EngineRefused, StaleRollout, StopRun, WeightMismatch

NAMED_ERRORS = (ValueError, StopRun, EngineDied, EngineRefused, WeightMismatch, StaleRollout)
LAUNCHER_PID = "MCORE_RL_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_PEER_GONE = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "tcpstore")


@dataclass(frozen=True)
class RankError:
    """Why one rank stopped. named: a reason of ours, meant for people. echo: it only noticed that a peer was gone."""

    rank: int
    kind: str
    message: str
    named: bool
    echo: bool
    time_s: float

    def line(self) -> str:
        """One line for a person."""
        return f"{self.message} [{self.kind}, rank {self.rank}]"


def describe_error(rank: int, error: BaseException) -> RankError:
    """The record of an exception; the first line of its message, or its type where it has none."""
    text = " ".join(str(error).split()) or type(error).__name__
    named = isinstance(error, NAMED_ERRORS)
    echo = not named and (type(error).__name__.startswith("Dist") or any(word in text.lower() for word in _PEER_GONE))
    return RankError(rank, type(error).__name__, text[:2000], named, echo, time.time())


def read_error(path: Path) -> RankError | None:
    """The record at `path`, None while there is none."""
    return RankError(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def on_uncaught(rank: int, record: Path, tell: Callable[[str], None] | None = None) -> None:
    """From here on an uncaught exception is recorded in one line at `record`, with its traceback on stderr (the log).

    tell: where else the line goes (the terminal, where no launcher of ours prints it).
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        reason = describe_error(rank, error)
        beside = record.with_suffix(".tmp")
        record.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(json.dumps(vars(reason)), encoding="utf-8")
        beside.replace(record)
        if tell is None or not reason.named:
            sys.__excepthook__(kind, error, trace)
        if tell is not None:
            tell(reason.line())

    sys.excepthook = hook


def end_on_sigterm() -> None:
    """SIGTERM unwinds the stack as an exit does, so that engines and shared memory are given back."""

    def stop(signum: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + signum)

    signal.signal(signal.SIGTERM, stop)


def die_with_parent(parent: int | None = None) -> None:
    """The kernel kills this process when its parent is gone, also when it hangs in a collective (Linux only).

    parent: the process that started this one, which may have ended before this call; None: what MCORE_RL_LAUNCHER_PID says,
    and without it whoever is the parent now.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = int(os.environ.pop(LAUNCHER_PID, os.getppid())) if parent is None else parent
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
