"""Equality of two mathematical answers by math-verify. Runs in a reward process only: `judge` asks it there.

math-verify's own limit is an alarm that works in the main thread only and never inside C code, so it is off.
"""

from __future__ import annotations

import logging
from typing import Any, cast

from math_verify import parse, verify  # pyright: ignore[reportMissingTypeStubs]

logging.disable(logging.CRITICAL)


def same_by_math_verify(pair: list[str]) -> bool:
    """True when math-verify calls [candidate, reference] equal; the reference is the gold side, read as boxed."""
    candidate, reference = pair
    gold = cast(list[Any], parse(_boxed(reference), parsing_timeout=0))
    target = cast(list[Any], parse(_boxed(candidate), parsing_timeout=0))
    return bool(gold) and bool(target) and verify(gold, target, timeout_seconds=0)


def _boxed(text: str) -> str:
    """The text as math-verify wants an anchored answer."""
    return "$\\boxed{" + text + "}$"
