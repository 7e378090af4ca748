"""JSON lines that keep NaN.

JSON has no NaN. Numbers that are not finite are written as the strings "NaN", "Infinity" and "-Infinity", so every
line is strict JSON for any reader, and Python's float() turns each back into the number. `read_rows` does that for files
of numbers; `read_texts` is for files that hold what somebody wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_NAMES = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: object) -> object:
    """`value` with every non-finite float replaced by its name, at any depth; NumPy-like scalars become Python numbers."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _name(value)
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(value: object) -> Any:
    """Undo `encode` on a metric row: the three names become floats again."""
    if isinstance(value, str):
        return _NAMES.get(value, value)
    if isinstance(value, dict):
        return {key: decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item) for item in value]
    return value


def dump_line(row: Mapping[str, object]) -> str:
    """One strict JSON line. TypeError when something in it is no JSON value."""
    return json.dumps(encode(row), allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of numbers, with NaN and infinities back in place. As `read_texts` otherwise."""
    return [decode(row) for row in read_texts(path)]


def read_texts(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file as they were written: a text that reads NaN stays a text.

    A last line without its newline is what a killed run leaves behind: it is dropped. Any other malformed line is a
    ValueError naming file and line.
    """
    # Bytes, because a text may hold U+2028 and other ends of line of str.splitlines, and a cut may go through a character.
    *lines, _ = path.read_bytes().split(b"\n")
    return [_object(line, f"{path}, line {number}") for number, line in enumerate(lines, start=1)]


def _object(line: bytes, where: str) -> dict[str, Any]:
    """The object of one line. ValueError naming `where`."""
    try:
        row = json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON ({error.msg})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not readable ({error})") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__} where an object is needed")
    return row


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
