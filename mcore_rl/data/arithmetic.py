"""The walk: k single-digit terms added and subtracted so that every running total stays in 0..9, as in `9-2-2-2-1+7`.

A worked demonstration writes the running totals after each step, `7 5 3 2 9 \\boxed{9}`; a direct one only the answer.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import accumulate

from mcore_rl.data.problem import Problem
from mcore_rl.rewards.judge import MathJudge
from mcore_rl.rewards.values import same_value
from mcore_rl.types import Prompt

MAX_TERMS = 1_000
WALK = re.compile(r"[0-9]([+-][1-9])*")
TERM = re.compile(r"[+-]?[0-9]")


@dataclass(frozen=True)
class Walk:
    """min_terms..max_terms: how many numbers a question has, drawn evenly."""

    min_terms: int
    max_terms: int
    judge: MathJudge

    def __post_init__(self) -> None:
        """ValueError on impossible difficulty."""
        if not 2 <= self.min_terms <= self.max_terms:
            raise ValueError(
                f"task.min_terms={self.min_terms}, task.max_terms={self.max_terms}: need 2 <= min_terms <= max_terms"
            )
        if self.max_terms > MAX_TERMS:
            raise ValueError(f"task.max_terms={self.max_terms}: at most {MAX_TERMS:,}; drawing longer questions takes minutes")

    def draw(self, rng: random.Random) -> Problem:
        """One question: each next term is even over all steps that keep the total in 0..9."""
        total = rng.randint(0, 9)
        question, totals = str(total), list[int]()
        for _ in range(rng.randint(self.min_terms, self.max_terms) - 1):
            step = rng.choice([step for step in range(-9, 10) if step and 0 <= total + step <= 9])
            total += step
            question += f"{step:+d}"
            totals.append(total)
        return Problem(question, str(total), " ".join(map(str, totals)), str(total))

    def answer(self, question: str) -> str | None:
        """The last total of a walk of this length; None for any other text."""
        if not WALK.fullmatch(question):
            return None
        totals = list(accumulate(int(term) for term in TERM.findall(question)))
        inside = all(0 <= total <= 9 for total in totals)
        return str(totals[-1]) if inside and self.min_terms <= len(totals) <= self.max_terms else None

    def equal(self, extracted: str, prompt: Prompt) -> bool:
        """Same value as the reference."""
        return same_value(extracted, prompt.answer, self.judge)
