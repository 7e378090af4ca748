"""Composition of a reward from its goal and auxiliary terms: correctness is a gate, never one term of a sum.

With F1 in [0, 1] the goal and aux the sum of the auxiliary terms (costs negative):

    goal           R = F1
    gated_silu     R = F1 + F1 sigmoid(F1) aux       (SiLU gate on F1, parameter free)
    gated_product  R = F1 (1 + aux)

A wrong answer earns exactly 0 whatever its auxiliary terms, so none of them can be collected without the goal. The
price: at F1 = 0 the costs vanish too, so watch the behaviour of wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeGuard

from mcore_rl.config.reward import PartialCredit, RewardForm
from mcore_rl.rewards.partial_credit import box_iou, token_f1

GOAL = "goal"
LENGTH_COST = "length_cost"
# An auxiliary cost never takes a right answer below half of a plain one: 1 - 0.5 (product), 1 - 0.366 (SiLU gate).
MAX_LENGTH_COST = 0.5


LARGEST = 1e12
"""Of a reward and its terms: the squares of larger ones do not fit the trainer's fp32."""
_SHOWN_CHARS = 100


def usable(value: object) -> TypeGuard[float]:
    """A number (no bool), neither NaN nor infinite nor beyond LARGEST; whole numbers of any size can be asked."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST


def shown(value: object) -> str:
    """For a message; a whole number of thousands of digits would be refused by `repr`."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a whole number of {value.bit_length()} bits"
    return repr(value)[:_SHOWN_CHARS]


def gated_silu(goal: float, aux: float) -> float:
    """F1 + F1 sigmoid(F1) aux."""
    return goal + goal * aux / (1.0 + math.exp(-goal))


def gated_product(goal: float, aux: float) -> float:
    """F1 (1 + aux)."""
    return goal * (1.0 + aux)


def compose(form: RewardForm, goal: float, components: Mapping[str, float]) -> float:
    """The reward. components: the auxiliary terms by name.

    ValueError: goal outside [0, 1], a term that is not finite, terms with a form that has none, or costs so large that
    a better answer would pay no more than a wrong one.
    """
    if not 0.0 <= goal <= 1.0:
        raise ValueError(f"goal={goal}: the goal lies in [0, 1]")
    lost = [f"{name}={shown(value)}" for name, value in components.items() if not usable(value)]
    if lost:
        raise ValueError(f"reward component {lost[0]}: a finite number is needed, {LARGEST:g} at most")
    aux = math.fsum(components.values())
    if form is RewardForm.goal:
        if components:
            raise ValueError(f"components {sorted(components)} have no place in reward.form=goal; use gated_silu")
        return goal
    reward = gated_silu(goal, aux) if form is RewardForm.gated_silu else gated_product(goal, aux)
    if goal > 0.0 and reward <= 0.0:
        raise ValueError(f"components {dict(components)} take a goal of {goal} to {reward}, no more than a wrong answer's 0")
    return reward


@dataclass(frozen=True)
class Composition:
    """The built-in reward: form, partial credit, cost per sampled token (0 is off, at most MAX_LENGTH_COST in all)."""

    form: RewardForm = RewardForm.goal
    partial_credit: PartialCredit = PartialCredit.none
    length_cost_per_token: float = 0.0

    def goal(self, *, format_ok: bool, correct: bool, extracted: str | None, reference: str) -> float:
        """F1 behind the format gate: 0 without the format, 1 for a correct answer, else its partial credit."""
        if not format_ok or extracted is None:
            return 0.0
        if correct:
            return 1.0
        if self.partial_credit is PartialCredit.token_f1:
            return token_f1(extracted, reference)
        return box_iou(extracted, reference) if self.partial_credit is PartialCredit.box_iou else 0.0

    def auxiliary(self, n_tokens: int) -> dict[str, float]:
        """The built-in auxiliary terms of an answer of `n_tokens` sampled tokens."""
        if self.length_cost_per_token == 0.0:
            return {}
        return {LENGTH_COST: -min(MAX_LENGTH_COST, self.length_cost_per_token * n_tokens)}

    @property
    def name(self) -> str:
        """For reward_version: everything that changes what an answer earns."""
        parts = [self.form.value]
        if self.partial_credit is not PartialCredit.none:
            parts.append(self.partial_credit.value)
        if self.length_cost_per_token:
            parts.append(f"length{self.length_cost_per_token:g}")
        return "+".join(parts)
