"""Equality of two mathematical answers by math-verify, with a time limit that always holds.

math-verify limits itself with SIGALRM, which works in the main thread only and never inside C code. So it runs in one
child process per judge, started at the first question and again after a timeout.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import subprocess
import sys
import weakref
from pathlib import Path

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
MAX_ANSWER_CHARS = 400


class MathJudge:
    """Asks math-verify in a child process. Not shared between threads: one judge each.

    timeouts counts the questions that ran into the limit; such a pair is judged different.
    """

    def __init__(self, limit_s: int = 5) -> None:
        """limit_s: seconds one comparison may take."""
        self.limit_s = limit_s
        self.timeouts = 0
        self._process: subprocess.Popen[str] | None = None

    def same(self, candidate: str, reference: str) -> bool:
        """Verdict of math-verify; False when it runs out of time or dies. RuntimeError when it cannot be started."""
        if max(len(candidate), len(reference)) > MAX_ANSWER_CHARS:
            return False
        reply = _ask(self._started(), [candidate, reference], self.limit_s + 1.0)
        if reply in ("true", "false"):
            return reply == "true"
        self.timeouts += 1
        logger.warning(
            "math-verify gave no verdict within %d s on %r against %r: judged different", self.limit_s, candidate, reference
        )
        self.close()
        return False

    def close(self) -> None:
        """End the child process."""
        if self._process is not None:
            _end(self._process)
            self._process = None

    def _started(self) -> subprocess.Popen[str]:
        """The running child, started when there is none."""
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = _start(self.limit_s)
            weakref.finalize(self, _end, self._process)
        return self._process


def _start(limit_s: int) -> subprocess.Popen[str]:
    """A child that said it is ready."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-m", "mcore_rl.rewards.judge_worker", str(limit_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    if _read_line(process, START_LIMIT_S) != "ready":
        _end(process)
        raise RuntimeError("math-verify could not be started: is the package math-verify installed beside mcore_rl?")
    return process


def _end(process: subprocess.Popen[str]) -> None:
    """Kill and reap, both pipes closed."""
    process.kill()
    process.communicate()


def _ask(process: subprocess.Popen[str], question: list[str], limit_s: float) -> str:
    """The child's answer, '' when it gave none."""
    if process.stdin is None:
        raise RuntimeError("the math-verify process has no input pipe")
    try:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return ""
    return _read_line(process, limit_s)


def _read_line(process: subprocess.Popen[str], limit_s: float) -> str:
    """One line of the child, or '' when none came in time or the child ended."""
    if process.stdout is None:
        raise RuntimeError("the math-verify process has no output pipe")
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        if not selector.select(limit_s):
            return ""
    return process.stdout.readline().strip()
