"""Which answers and groups of a rollout batch are trained on. DAPO, arXiv 2503.14476. B samples, in groups by prompt id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mcore_rl.algorithms.advantages import group_indices
from mcore_rl.config.algorithm import Overlong, SelectionConfig


@dataclass(frozen=True)
class Graded:
    """What selection looks at, B of each. usable: has a reward and was not filtered. rewards: the task's own."""

    prompt_ids: Sequence[str]
    rewards: Sequence[float]
    correct: Sequence[bool]
    usable: Sequence[bool]


@dataclass(frozen=True)
class Groups:
    """Groups by prompt id, in order of appearance, sorted by what becomes of them. A group is kept or dropped as a whole.

    mixed: more than one reward value among its usable samples. Groups outside the pass-rate band are in `outside`,
    whatever their rewards. unusable: none of its samples is usable.
    """

    mixed: list[str] = field(default_factory=list[str])
    all_wrong: list[str] = field(default_factory=list[str])
    all_right: list[str] = field(default_factory=list[str])
    one_reward: list[str] = field(default_factory=list[str])
    outside: list[str] = field(default_factory=list[str])
    unusable: list[str] = field(default_factory=list[str])


def sort_groups(graded: Graded, config: SelectionConfig) -> Groups:
    """Every group into one list. Unanimity is of the task's reward; right and wrong are told by the verdict."""
    sorted_groups = Groups()
    for prompt_id, index in group_indices(graded.prompt_ids).items():
        usable = [i for i in index if graded.usable[i]]
        _place(prompt_id, usable, graded, config, sorted_groups)
    return sorted_groups


def _place(prompt_id: str, usable: list[int], graded: Graded, config: SelectionConfig, groups: Groups) -> None:
    if not usable:
        groups.unusable.append(prompt_id)
        return
    right = sum(graded.correct[i] for i in usable)
    if not config.pass_rate_low <= right / len(usable) <= config.pass_rate_high:
        groups.outside.append(prompt_id)
    elif len({graded.rewards[i] for i in usable}) > 1:
        groups.mixed.append(prompt_id)
    elif right == 0:
        groups.all_wrong.append(prompt_id)
    elif right == len(usable):
        groups.all_right.append(prompt_id)
    else:
        groups.one_reward.append(prompt_id)


def replaces(config: SelectionConfig) -> bool:
    """Whether some groups are replaced by newly generated ones at all."""
    return config.dynamic_sampling or config.pass_rate_low > 0.0 or config.pass_rate_high < 1.0


def wanted(groups: Groups, config: SelectionConfig) -> list[str]:
    """Groups that selection asks for: mixed ones, and without dynamic sampling every one inside the band."""
    if config.dynamic_sampling:
        return groups.mixed
    return [*groups.mixed, *groups.all_wrong, *groups.all_right, *groups.one_reward]


def choose_groups(groups: Groups, order: Sequence[str], count: int, config: SelectionConfig) -> tuple[list[str], int]:
    """The `count` groups to train on, and how many of them are only there to fill the batch up.

    order: prompt ids as drawn. The wanted ones first, in order; what is missing after the last round is filled with
    the others in order, so the batch keeps its size. Those teach nothing, or are outside the band, and are counted.
    """
    asked = set(wanted(groups, config)) if replaces(config) else set(order)
    chosen = [name for name in order if name in asked][:count]
    filling = [name for name in order if name not in asked][: count - len(chosen)]
    return [*chosen, *filling], len(filling)


def overlong_reward(tokens: int, config: SelectionConfig, max_tokens: int) -> float:
    """What an answer of `tokens` pays for its length, <= 0: linear over the last overlong_buffer of max_tokens.

    DAPO's soft punishment, with L = max_tokens and B = overlong_buffer x L: min((L - B - tokens) / B, 0) x penalty.
    """
    if config.overlong is not Overlong.penalty:
        return 0.0
    buffer = config.overlong_buffer * max_tokens
    return min((max_tokens - buffer - tokens) / buffer, 0.0) * config.overlong_penalty
