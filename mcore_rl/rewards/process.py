"""One reward process as its parent sees it: started, asked one question at a time, read without blocking, killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

START_LIMIT_S = 60.0
# The process ends itself at its limit; the parent waits this much longer before it does so.
GRACE_S = 1.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class CallSpec:
    """Which function, and what one call of it may cost. warm_up: argument of a call made before the first question.

    log: file that gets what the function prints; None throws it away.
    """

    target: str
    limit_s: float
    memory_bytes: int = 4 * 1024**3
    warm_up: Any = None
    log: Path | None = None

    def command(self) -> list[str]:
        """Arguments of the process."""
        words = [sys.executable, "-m", "mcore_rl.rewards.worker", self.target, str(self.limit_s), str(self.memory_bytes)]
        return words if self.warm_up is None else [*words, json.dumps(self.warm_up)]


class RewardProcess:
    """A process that is starting, idle or busy with question `asked`; `deadline_s` is on the monotonic clock."""

    def __init__(self, spec: CallSpec) -> None:
        self.spec = spec
        self.asked: int | None = None
        self.ready = False
        self.deadline_s = time.monotonic() + START_LIMIT_S
        self._buffer = b""
        self._popen = _popen(spec)

    def fileno(self) -> int:
        """Descriptor to wait on for replies."""
        if self._popen.stdout is None:
            raise RuntimeError("the reward process has no output pipe")
        return self._popen.stdout.fileno()

    def ask(self, question: int, argument: Any) -> bool:
        """Send a question; False when the process is gone."""
        if self._popen.stdin is None:
            raise RuntimeError("the reward process has no input pipe")
        line = json.dumps(argument).encode() + b"\n"
        try:
            self._popen.stdin.write(line)
            self._popen.stdin.flush()
        except BrokenPipeError:
            return False
        self.asked, self.deadline_s = question, time.monotonic() + self.spec.limit_s + GRACE_S
        return True

    def read(self) -> tuple[dict[str, Any] | None, bool]:
        """(a complete reply or None, whether the process closed its end). Called when the descriptor is readable."""
        block = os.read(self.fileno(), _READ_BYTES)
        self._buffer += block
        line, newline, rest = self._buffer.partition(b"\n")
        if not newline:
            return None, not block
        self._buffer = rest
        return cast(dict[str, Any], json.loads(line)), False

    def has_ended(self) -> bool:
        """Whether the process is over, also when a child it left behind still holds its pipe open. Does not reap it."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._popen.returncode is not None or os.waitid(os.P_PID, self._popen.pid, options) is not None

    def hit_its_limit(self) -> bool:
        """After `end`: whether its own timer had ended it before (a call that took too long)."""
        return self._popen.returncode == -signal.SIGALRM

    def exit_word(self) -> str:
        """After `end`: how it ended."""
        code = self._popen.returncode
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def end(self) -> None:
        """Kill the process and whatever it started, reap it, close both pipes. Twice is fine.

        Killed before it is reaped: until then its process group is nobody else's. One that was already ending keeps its
        own exit code.
        """
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.communicate()


def _popen(spec: CallSpec) -> subprocess.Popen[bytes]:
    """A session of its own, so that the function's own children can be ended with it."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    if spec.log is None:
        return _start(spec, environment, subprocess.DEVNULL)
    with spec.log.open("ab") as log:
        return _start(spec, environment, log.fileno())


def _start(spec: CallSpec, environment: dict[str, str], errors: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec.command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        start_new_session=True,
    )
