"""The math-verify process: reads JSON pairs from stdin, answers one JSON verdict a line. Started by `judge`.

Its alarm has the kernel's default action, so a comparison that never returns (even inside C code) ends this process,
also when the parent is gone; math-verify's own alarms are off.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any, cast

from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]

MEMORY_BYTES = 4 * 1024**3


def same_by_math_verify(candidate: str, reference: str) -> bool:
    """True when math-verify calls the two equal; the reference is the gold side, read as the content of a box."""
    gold = cast(list[Any], parse(_boxed(reference), parsing_timeout=0))
    target = cast(list[Any], parse(_boxed(candidate), parsing_timeout=0))
    return bool(gold) and bool(target) and verify(gold, target, timeout_seconds=0)


def _boxed(text: str) -> str:
    """The text as math-verify wants an anchored answer."""
    return "$\\boxed{" + text + "}$"


def serve(limit_s: int) -> None:
    """Answer until stdin closes. Anything a library prints goes to stderr, so stdout carries verdicts only."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # The first comparison builds parsers and caches; without it here a slow machine would charge that to a sample.
    same_by_math_verify(r"\sqrt{4}", "2")
    replies.write("ready\n")
    replies.flush()
    for line in sys.stdin:
        candidate, reference = cast(list[str], json.loads(line))
        signal.alarm(limit_s)
        verdict = same_by_math_verify(candidate, reference)
        signal.alarm(0)
        replies.write(json.dumps(verdict) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
