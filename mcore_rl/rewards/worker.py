"""The reward process: calls one function on what it reads from stdin, one JSON line per call. Started by `process`.

    python -m mcore_rl.rewards.worker package.module:name LIMIT_S MEMORY_BYTES [WARM_UP_ARGUMENT]

Its timer has the kernel's default action, so a call that never returns (even inside C code) ends this process, also
when the parent is gone. Nothing of torch is imported here: a restart takes as long as the function's own imports.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from numbers import Real
from pathlib import Path
from types import TracebackType
from typing import Any, cast

MAX_DETAIL_CHARS = 500


class Caught:
    """Context manager that keeps what a foreign function raises, so that one sample's error stays that sample's."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None

    def describe(self) -> str:
        """Type, message and the innermost place of the error."""
        if self.error is None:
            return ""
        frames = traceback.extract_tb(self.error.__traceback__)
        place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        return f"{type(self.error).__name__}: {self.error}{place}"[:MAX_DETAIL_CHARS]


def load_function(target: str) -> Callable[[Any], Any]:
    """The function `package.module:name`. ValueError when the target is not of that form or no function."""
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"'{target}' is not of the form package.module:name")
    function = vars(import_module(module)).get(name)
    if not callable(function):
        raise ValueError(f"module {module} has no function {name!r}")
    return cast(Callable[[Any], Any], function)


def source_sha256(target: str) -> str:
    """Digest of the function's module file: which code paid the rewards."""
    source = import_module(target.partition(":")[0]).__file__
    return hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""


def plain(value: object) -> Any:
    """The value as JSON builtins: any real number (NumPy's too) as int or float, mappings and lists at any depth.

    TypeError for anything else: no text or object is ever read as a number.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): plain(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(list[object], value)]
    raise TypeError(f"{type(value).__name__} {value!r}"[:MAX_DETAIL_CHARS])


def answer(function: Callable[[Any], Any], argument: Any, limit_s: float) -> dict[str, Any]:
    """One call: {"value": ...}, {"error": text} when it raised, {"unusable": text} when its result is no JSON value."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    value: object = None
    with Caught() as call:
        value = function(argument)
    with Caught() as reading:
        value = plain(value)
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    if call.error is not None:
        return {"error": call.describe()}
    return {"value": value} if reading.error is None else {"unusable": str(reading.error)}


def serve(target: str, limit_s: float, memory_bytes: int, warm_up: str | None) -> None:
    """Answer until stdin closes. What the function prints goes to stderr, so stdout carries replies only."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    function: Callable[[Any], Any] | None = None
    digest = ""
    with Caught() as start:
        function = load_function(target)
        digest = source_sha256(target)
        if warm_up is not None:
            function(json.loads(warm_up))
    if function is None or start.error is not None:
        replies.write(json.dumps({"unavailable": start.describe()}) + "\n")
        replies.flush()
        return
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies.write(json.dumps({"ready": digest}) + "\n")
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(function, json.loads(line), limit_s)) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else None)
