"""One problem of a task: what is asked, the reference answer, and how demonstrations write it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """worked: text of the steps that come before the answer slot in a worked demonstration ('' when there are none).

    shown: the answer as a demonstration writes it into the slot (for Countdown an expression, else the answer itself).
    """

    question: str
    answer: str
    worked: str
    shown: str
