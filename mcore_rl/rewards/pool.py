"""A few reward processes that share the questions of a batch. A question that hangs, kills its process or raises costs
itself alone: the process is replaced and the others go on.
"""

from __future__ import annotations

import selectors
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mcore_rl.rewards.process import CallSpec, RewardProcess

# How often a process that says nothing is looked at: it may be over while a child of its own keeps the pipe open.
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Reply:
    """value of one call, or why there is none: timeout, crash (the process ended), error (it raised), unusable (its
    result is no JSON value). detail: in words."""

    value: Any = None
    failure: str | None = None
    detail: str = ""


class RewardPool:
    """At most `workers` processes, started with the first question and again after a timeout or a crash.

    Not shared between threads. restarts counts the processes that were replaced.
    """

    def __init__(self, spec: CallSpec, workers: int) -> None:
        """spec: the function and its limits. workers: processes at the same time, at least 1."""
        self.spec = spec
        self.restarts = 0
        self.source_sha256 = ""
        self._workers = workers
        self._processes: list[RewardProcess] = []
        weakref.finalize(self, _end_all, self._processes)

    def ask_all(self, arguments: Sequence[Any]) -> list[Reply]:
        """One reply per argument, in their order. RuntimeError when the function cannot be loaded at all."""
        waiting, replies = deque(range(len(arguments))), dict[int, Reply]()
        while len(self._processes) < min(self._workers, len(arguments)):
            self._processes.append(RewardProcess(self.spec))
        try:
            while len(replies) < len(arguments):
                self._hand_out(waiting, arguments)
                self._collect(replies)
        finally:
            self._drop_busy()
        return [replies[i] for i in range(len(arguments))]

    def check(self) -> str:
        """Start one process and wait until it is ready; the SHA-256 of the file that defines the function.

        RuntimeError saying why the function cannot be loaded.
        """
        if not self._processes:
            self._processes.append(RewardProcess(self.spec))
        while not self._processes[0].ready:
            self._collect({})
        return self.source_sha256

    def close(self) -> None:
        """End every process. Twice is fine; the next question starts new ones."""
        _end_all(self._processes)

    def _hand_out(self, waiting: deque[int], arguments: Sequence[Any]) -> None:
        """A question for every idle process; one that is gone is replaced, and the question waits for the next."""
        for place, process in enumerate(self._processes):
            if not waiting or not process.ready or process.asked is not None:
                continue
            if process.ask(waiting[0], arguments[waiting[0]]):
                waiting.popleft()
            else:
                self._replace(place)

    def _collect(self, replies: dict[int, Reply]) -> None:
        """Wait until something is heard or the next deadline passes, and settle it."""
        pending = [p for p in self._processes if not p.ready or p.asked is not None]
        if not pending:
            return
        with selectors.DefaultSelector() as selector:
            for process in pending:
                selector.register(process, selectors.EVENT_READ)
            wait_s = min(process.deadline_s for process in pending) - time.monotonic()
            heard = {key.fd for key, _ in selector.select(min(max(0.0, wait_s), LOOK_EVERY_S))}
        for place, process in enumerate(list(self._processes)):
            if process in pending:
                self._settle(place, replies, readable=process.fileno() in heard)

    def _settle(self, place: int, replies: dict[int, Reply], *, readable: bool) -> None:
        process = self._processes[place]
        message, closed = process.read() if readable else (None, False)
        if message is not None:
            self._take(process, message, replies)
        elif closed or (not readable and process.has_ended()):
            self._failed(place, replies, late=False)
        elif time.monotonic() >= process.deadline_s:
            self._failed(place, replies, late=True)

    def _take(self, process: RewardProcess, message: dict[str, Any], replies: dict[int, Reply]) -> None:
        """A line from a process: it is ready, it can never be, or it answers."""
        if process.asked is None:
            if "unavailable" in message:
                self.close()
                raise RuntimeError(f"{self.spec.target} cannot be loaded: {message['unavailable']}")
            process.ready, self.source_sha256 = True, str(message["ready"])
            return
        replies[process.asked] = _reply(message)
        process.asked = None

    def _failed(self, place: int, replies: dict[int, Reply], *, late: bool) -> None:
        """The process ended or is overdue: its question has no answer, and another process takes its place."""
        process = self._processes[place]
        process.end()
        if process.asked is None:
            self.close()
            raise RuntimeError(f"{self.spec.target}: its process did not start ({'too slow' if late else process.exit_word()})")
        if late or process.hit_its_limit():
            reply = Reply(failure="timeout", detail=f"no answer within {self.spec.limit_s:g} s")
        else:
            reply = Reply(failure="crash", detail=f"the reward process ended: {process.exit_word()}")
        replies[process.asked] = reply
        self._replace(place)

    def _replace(self, place: int) -> None:
        self._processes[place].end()
        self._processes[place] = RewardProcess(self.spec)
        self.restarts += 1

    def _drop_busy(self) -> None:
        """After an interruption no process may hold an answer that the next batch would take for its own."""
        for place in reversed(range(len(self._processes))):
            if self._processes[place].asked is not None:
                self._processes.pop(place).end()


def _reply(message: dict[str, Any]) -> Reply:
    if "error" in message:
        return Reply(failure="error", detail=str(message["error"]))
    if "unusable" in message:
        return Reply(failure="unusable", detail=str(message["unusable"]))
    return Reply(value=message["value"])


def _end_all(processes: list[RewardProcess]) -> None:
    while processes:
        processes.pop().end()
