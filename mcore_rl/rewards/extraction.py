r"""Strict extraction of a final answer: one well-formed slot, or None. Nothing is ever scavenged from the rest of the text.

Three slots: `\boxed{...}` ("boxed"), a line `#### n` ("hash", GSM8K), `<SOLUTION>...</SOLUTION>` ("solution").
The same value given twice is one answer; two different values are ambiguous, hence None.
"""

from __future__ import annotations

import re
from collections.abc import Callable

BOXED_OPEN = r"\boxed{"
HASH_LINE = re.compile(r"^####[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
SOLUTION = re.compile(r"<SOLUTION>(.*?)</SOLUTION>", re.DOTALL)


def extract_boxed(text: str) -> str | None:
    r"""Content of the one `\boxed{...}`, braces balanced; None when missing, empty, nested, unclosed or ambiguous."""
    found: set[str] = set()
    start = text.find(BOXED_OPEN)
    while start >= 0:
        end = _closing_brace(text, start + len(BOXED_OPEN))
        if end is None:
            return None
        content = text[start + len(BOXED_OPEN) : end].strip()
        if BOXED_OPEN in content:
            return None
        found.add(content)
        start = text.find(BOXED_OPEN, end)
    return _only(found)


def extract_hash(text: str) -> str | None:
    """What follows `####` on its line; None when missing or ambiguous."""
    return _only({match.group(1) for match in HASH_LINE.finditer(text)})


def extract_solution(text: str) -> str | None:
    """Content of the one `<SOLUTION>` element; None when missing, empty, nested, unclosed or ambiguous."""
    contents = {match.group(1).strip() for match in SOLUTION.finditer(text)}
    opened, closed = text.count("<SOLUTION>"), text.count("</SOLUTION>")
    if opened != closed or any("<SOLUTION>" in content for content in contents):
        return None
    return _only(contents)


def _closing_brace(text: str, start: int) -> int | None:
    r"""Index of the brace that closes the one before `start`; `\{` and `\}` are text."""
    depth, i = 1, start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return i
        i += 1
    return None


def _only(found: set[str]) -> str | None:
    """The single non-empty value."""
    if len(found) != 1:
        return None
    return next(iter(found)) or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "boxed": extract_boxed,
    "hash": extract_hash,
    "solution": extract_solution,
}

# Whole answer = text without the slot's own opening character, then the slot, then nothing (the stop token follows).
FULL_FORMATS: dict[str, str] = {
    "boxed": r"[^\\]*\\boxed\{{({body})\}}",
    "hash": r"[^#]*#### ({body})",
    "solution": r"[^<]*<SOLUTION>({body})</SOLUTION>",
}

# How an answer is written into each slot (demonstrations).
SLOTS: dict[str, str] = {
    "boxed": r"\boxed{{{answer}}}",
    "hash": "#### {answer}",
    "solution": "<SOLUTION>{answer}</SOLUTION>",
}


def require_pattern(pattern: str) -> None:
    """ValueError unless `pattern` names one of the slots."""
    if pattern not in EXTRACTORS:
        raise ValueError(f"task.answer_pattern: '{pattern}' is unknown; one of {sorted(EXTRACTORS)}")


def full_format(pattern: str, body: str) -> re.Pattern[str]:
    """Regular expression of a whole well-formed answer; group 1 is the answer, itself a match of `body`."""
    require_pattern(pattern)
    return re.compile(FULL_FORMATS[pattern].format(body=body))


def write_slot(pattern: str, answer: str) -> str:
    """The answer in its slot, as a demonstration writes it."""
    require_pattern(pattern)
    return SLOTS[pattern].format(answer=answer)
