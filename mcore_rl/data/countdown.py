"""Countdown: combine the given numbers, each exactly once, with + - * / to reach a target. The answer is an expression.

The question is `3 7 12 = 24` (numbers, then the target); say the rules to a real model in task.system_prompt.
Every question has a solution, because it is made from one.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from fractions import Fraction

from mcore_rl.data.problem import Problem
from mcore_rl.rewards.expression import OPERATORS, reaches_target
from mcore_rl.types import Prompt

SYMBOLS = dict(zip("+-*/", OPERATORS.values(), strict=True))
MAX_TARGET = 999
MAX_COUNT = 8
QUESTION = re.compile(r"[1-9][0-9]{0,3}( [1-9][0-9]{0,3})* = (0|[1-9][0-9]{0,2})")


@dataclass(frozen=True)
class Countdown:
    """count numbers in 1..max_number."""

    count: int
    max_number: int

    def __post_init__(self) -> None:
        """ValueError on impossible difficulty."""
        if self.count < 2 or self.max_number < 2:
            raise ValueError(f"task.numbers={self.count}, task.max_number={self.max_number}: both must be at least 2")
        if self.count > MAX_COUNT or self.max_number > MAX_TARGET:
            raise ValueError(
                f"task.numbers={self.count}, task.max_number={self.max_number}: at most {MAX_COUNT} and {MAX_TARGET}; "
                "beyond that hardly any random combination stays in 0..999, and questions cannot be drawn"
            )

    def draw(self, rng: random.Random) -> Problem:
        """One question with an integer target in 0..999, made by combining random pairs until one value is left."""
        while True:
            numbers = [rng.randint(1, self.max_number) for _ in range(self.count)]
            made = _combine(rng, numbers)
            if made is not None:
                value, expression, steps = made
                question = f"{' '.join(map(str, numbers))} = {value}"
                return Problem(question, str(value), " ".join(steps), expression)

    def answer(self, question: str) -> str | None:
        """The target of a question with so many numbers in 1..max_number; None for any other text.

        Whether the target can be reached is not looked at.
        """
        if not QUESTION.fullmatch(question):
            return None
        numbers, target = parse_question(question)
        fits = len(numbers) == self.count and all(1 <= number <= self.max_number for number in numbers)
        return str(target) if fits and target <= MAX_TARGET else None

    def equal(self, extracted: str, prompt: Prompt) -> bool:
        """The expression reaches the target and uses each number exactly once."""
        numbers, target = parse_question(prompt.question)
        return reaches_target(extracted, numbers, target)


def parse_question(question: str) -> tuple[list[int], int]:
    """Numbers and target of a question."""
    left, target = question.split(" = ")
    return [int(number) for number in left.split()], int(target)


def _combine(rng: random.Random, numbers: list[int]) -> tuple[int, str, list[str]] | None:
    """Value, expression and steps of one random combination; None when a value leaves the integers 0..999."""
    pool = [(Fraction(number), str(number)) for number in numbers]
    steps: list[str] = []
    while len(pool) > 1:
        (left, left_text), (right, right_text) = (pool.pop(rng.randrange(len(pool))) for _ in range(2))
        symbol = rng.choice("+-*/")
        if symbol == "/" and right == 0:
            return None
        value = SYMBOLS[symbol](left, right)
        if value.denominator != 1 or not 0 <= value <= MAX_TARGET:
            return None
        steps.append(f"{left}{symbol}{right}={value}")
        pool.append((value, f"({left_text}{symbol}{right_text})"))
    value, text = pool[0]
    return int(value), text[1:-1], steps
