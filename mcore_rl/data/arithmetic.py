"""The walk: k single-digit terms added and subtracted so that every running total stays in 0..9, as in `9-2-2-2-1+7`.

A worked demonstration writes the running totals after each step, `7 5 3 2 9 \\boxed{9}`; a direct one only the answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from mcore_rl.data.problem import Problem
from mcore_rl.rewards.judge import MathJudge
from mcore_rl.rewards.values import same_value
from mcore_rl.types import Prompt


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

    def equal(self, extracted: str, prompt: Prompt) -> bool:
        """Same value as the reference."""
        return same_value(extracted, prompt.answer, self.judge)
