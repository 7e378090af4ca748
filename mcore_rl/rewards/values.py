"""Comparison of answers by value: 1/2 equals 0.5, 12 equals 12.0, 1,000 equals 1000.

Plain numbers are compared exactly as fractions, here. Everything else goes to math-verify in a process of its own
(`judge`), because sympy can hang in C code, where no alarm of the calling process reaches it.
"""

from __future__ import annotations

import re
from fractions import Fraction

from mcore_rl.rewards.judge import MathJudge

MAX_NUMBER_CHARS = 64
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
NUMBER = re.compile(rf"([+-]?)(?:\\?\$)?\s*({_UNSIGNED})\.?")
RATIO = re.compile(r"([+-]?)\s*(\d+)\s*/\s*(\d+)")
FRAC = re.compile(r"([+-]?)\s*\\[dt]?frac\{(\d+)\}\{(\d+)\}")
GSM8K_ANSWER = re.compile(rf"####[ \t]*(-?(?:{_UNSIGNED}))\s*\Z")


def parse_number(text: str) -> Fraction | None:
    r"""Exact value of an integer, a decimal, a number with thousands commas, `a/b` or `\frac{a}{b}`; else None."""
    text = text.strip()
    if len(text) > MAX_NUMBER_CHARS:
        return None
    if match := NUMBER.fullmatch(text):
        value = Fraction(match.group(2).replace(",", ""))
    elif match := (RATIO.fullmatch(text) or FRAC.fullmatch(text)):
        if int(match.group(3)) == 0:
            return None
        value = Fraction(int(match.group(2)), int(match.group(3)))
    else:
        return None
    return -value if match.group(1) == "-" else value


def same_value(candidate: str, reference: str, judge: MathJudge) -> bool:
    """True when both mean the same value. Never raises on what a model wrote; an undecidable pair is not the same."""
    left, right = parse_number(candidate), parse_number(reference)
    if left is not None and right is not None:
        return left == right
    if candidate.strip() == reference.strip():
        return True
    return judge.same(candidate, reference)


def parse_gsm8k_answer(answer: str) -> str:
    """Reference value of a GSM8K answer: the number after the closing `####`, commas removed (Cobbe et al. 2110.14168).

    ValueError when the answer does not end in `#### n`, or n has commas that do not separate thousands.
    """
    match = GSM8K_ANSWER.search(answer)
    if match is None or answer.count("####") != 1:
        raise ValueError(f"must end in '#### n' with one number n, got {answer[-40:]!r}")
    return match.group(1).replace(",", "")
