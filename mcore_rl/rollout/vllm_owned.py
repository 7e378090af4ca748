"""Link to an engine this run owns: starts the child process, talks to it, notices its death, leaves nothing behind."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mcore_rl.errors import EngineRefused
from mcore_rl.types import EngineDied

_POLL_S = 0.2
_CLOSE_S = 10.0
_PING_S = 30.0
_EXIT_S = 5.0
_NOW_S = 0.001
_LONG = -1
_LONGEST = 2**31 - 1


class Pipe:
    """Our end of the child's multiprocessing.connection. Nothing outlasts its deadline (TimeoutError), wherever the child
    stops: a Connection would block in the middle of a message. EOFError when the child has ended.
    """

    def __init__(self, end: socket.socket, ended: Callable[[], bool]) -> None:
        """ended: whether the child has; what it started may hold the other end open."""
        self._end = end
        self._ended = ended

    def send(self, message: bytes, deadline: float) -> None:
        """One message. deadline: as time.monotonic has it."""
        size = len(message)
        header = struct.pack("!i", size) if size <= _LONGEST else struct.pack("!iQ", _LONG, size)
        rest = memoryview(header + message)
        while rest:
            rest = rest[self._step(self._end.send, rest, deadline) :]

    def receive(self, deadline: float) -> bytearray:
        """One message."""
        (size,) = struct.unpack("!i", self._take(4, deadline))
        if size == _LONG:
            (size,) = struct.unpack("!Q", self._take(8, deadline))
        return self._take(size, deadline)

    def close(self) -> None:
        """Let go of it."""
        self._end.close()

    def _take(self, size: int, deadline: float) -> bytearray:
        found = bytearray(size)
        rest = memoryview(found)
        while rest:
            count = self._step(self._end.recv_into, rest, deadline)
            if not count:
                raise EOFError
            rest = rest[count:]
        return found

    def _step(self, move: Callable[[memoryview], int], data: memoryview, deadline: float) -> int:
        ended = False
        while True:
            left = deadline - time.monotonic()
            self._end.settimeout(max(min(left, _POLL_S), _NOW_S))
            try:
                return move(data)
            except TimeoutError:
                if ended:
                    raise EOFError from None
                if left <= 0:
                    raise
                ended = self._ended()  # it may have spoken just before: only the next silence counts


class OwnedLink:
    """One vLLM child. The constructor returns at once; `wait_ready` waits for the engine."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        log_path: Path,
        start_timeout_s: float,
        request_timeout_s: float,
    ) -> None:
        """Start the child: fresh interpreter, session of its own (so Ctrl-C does not reach it), output to `log_path`."""
        self.name = f"vllm owned (log {log_path})"
        self.log_path = log_path
        self.start_s: float | None = None
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        ours, theirs = socket.socketpair()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "mcore_rl.rollout.vllm_child"]
        with theirs, log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid()), json.dumps(dict(arguments))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._pipe = Pipe(ours, lambda: self._process.poll() is not None)
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Block until the engine answers. EngineDied when it dies or is not up within the start-up limit."""
        if self.start_s is None:
            left = self._start_timeout_s - (time.monotonic() - self._started)
            with self._limited("start", max(left, 0.0)) as deadline:
                answer = json.loads(self._pipe.receive(deadline))
            self._result("start", answer)
            self.start_s = time.monotonic() - self._started

    def generate(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Outputs in the order of the requests."""
        return self._call("generate", requests)

    def score(self, requests: list[dict[str, Any]]) -> list[list[float]]:
        """Prompt log-probs in the order of the requests."""
        return self._call("score", requests)

    def top_logprobs(self, requests: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Likeliest tokens of the prompts, in the order of the requests."""
        return self._call("top_logprobs", requests)

    def native(self, step: str, payload: dict[str, Any]) -> None:
        """One call of the weight-transfer lifecycle: init, start, update, finish."""
        self._call("native", step, payload)

    def rpc(self, method: str, args: list[Any]) -> list[Any]:
        """A worker-extension call, one result per worker."""
        return self._call("rpc", method, args)

    def reset_prefix_cache(self) -> bool:
        """Whether the cache was emptied."""
        return self._call("reset_prefix_cache")

    def set_version(self, version: str) -> None:
        """Label the weights."""
        self._call("set_version", version)

    def get_version(self) -> str:
        """The engine's own label."""
        return self._call("get_version")

    def sleep(self, level: int) -> None:
        """Give the GPU memory back."""
        self._call("sleep", level)

    def wake(self) -> None:
        """Take it again."""
        self._call("wake")

    def health(self) -> None:
        """EngineDied when the child is gone or does not answer."""
        self.wait_ready()
        self._ask("ping", (), _PING_S)

    def close(self) -> None:
        """End the child and everything it started; safe to call twice."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            if self.start_s is not None:
                self._say_close()
            self._kill()
        self._pipe.close()

    def _say_close(self) -> None:
        try:
            self._pipe.send(_message("close", ()), time.monotonic() + _CLOSE_S)
            self._process.wait(_CLOSE_S)
        except (EOFError, OSError, subprocess.TimeoutExpired):
            return

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _call(self, op: str, *args: Any) -> Any:
        self.wait_ready()
        return self._ask(op, args, self._request_timeout_s)

    def _ask(self, op: str, args: tuple[Any, ...], limit_s: float) -> Any:
        with self._limited(op, limit_s) as deadline:
            self._pipe.send(_message(op, args), deadline)
            answer = json.loads(self._pipe.receive(deadline))
        return self._result(op, answer)

    @contextmanager
    def _limited(self, op: str, limit_s: float) -> Iterator[float]:
        """The deadline of an exchange; EngineDied whatever ends it early, and the child with it."""
        try:
            yield time.monotonic() + limit_s
        except TimeoutError as failure:
            self._kill()
            raise EngineDied(
                f"rollout engine {self.name} did not answer '{op}' within {limit_s:.0f} s and was stopped"
            ) from failure
        except (EOFError, OSError) as failure:
            raise self._died(op) from failure
        except json.JSONDecodeError as failure:
            self._kill()
            raise EngineDied(f"rollout engine {self.name} answered '{op}' with something that is no JSON") from failure

    def _result(self, op: str, answer: dict[str, Any]) -> Any:
        if "error" in answer:
            raise EngineRefused(f"{self.name}: {op}: {answer['kind']}: {answer['error']}")
        return answer["result"]

    def _died(self, op: str) -> EngineDied:
        with suppress(subprocess.TimeoutExpired):  # the pipe closes a moment before the exit code is known
            self._process.wait(_EXIT_S)
        self._kill()
        code = self._process.returncode
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return EngineDied(f"rollout engine {self.name} died during '{op}': {how}; last line: {self._last_line()}")

    def _last_line(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "(log is empty)")[-300:]


def _message(op: str, args: tuple[Any, ...]) -> bytes:
    return json.dumps({"op": op, "args": args}).encode()
