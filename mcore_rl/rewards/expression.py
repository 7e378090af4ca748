"""Safe value of an arithmetic expression over given numbers (Countdown). The text is parsed, never evaluated as code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction

MAX_CHARS = 100
ALLOWED = re.compile(r"[0-9+\-*/() ]+")
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: Fraction.__add__,
    ast.Sub: Fraction.__sub__,
    ast.Mult: Fraction.__mul__,
    ast.Div: Fraction.__truediv__,
}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """Exact value and the integers used, in reading order. Only + - * / and parentheses over non-negative integers.

    ValueError on anything else, division by zero included.
    """
    if len(text) > MAX_CHARS or not ALLOWED.fullmatch(text):
        raise ValueError(f"not an arithmetic expression of at most {MAX_CHARS} characters: {text[:MAX_CHARS]!r}")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not an arithmetic expression: {text!r}") from error
    used: list[int] = []
    return _value(tree.body, used), used


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Value of a node; appends the integers it meets to `used`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left, used), _value(node.right, used)
        if isinstance(node.op, ast.Div) and right == 0:
            raise ValueError("division by zero")
        return OPERATORS[type(node.op)](left, right)
    raise ValueError(f"{type(node).__name__} is not allowed in an arithmetic expression")


def reaches_target(text: str, numbers: Iterable[int], target: int, *, use_all: bool = True) -> bool:
    """True when the expression equals `target` and uses each of `numbers` exactly once (at most once without use_all)."""
    try:
        value, used = evaluate_expression(text)
    except ValueError:
        return False
    have, spent = Counter(numbers), Counter(used)
    fits = have == spent if use_all else spent <= have
    return fits and value == target
