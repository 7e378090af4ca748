"""Selection applied to a rollout batch: which answers count, which groups are trained on, and what was dropped and why.

Everything here looks at the task's own scores. B samples, in groups by prompt id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mcore_rl.algorithms.advantages import group_indices
from mcore_rl.algorithms.selection import Graded, choose_groups, overlong_reward, replaces, sort_groups, wanted
from mcore_rl.config.algorithm import Overlong, SelectionConfig
from mcore_rl.types import Score


@dataclass(frozen=True)
class Selected:
    """prompt_ids: the groups to train on. facts: dynsamp/*, drop/* and group/* as they are logged."""

    prompt_ids: tuple[str, ...]
    facts: dict[str, float]


def usable_samples(scores: Sequence[Score], selection: SelectionConfig) -> list[bool]:
    """True for what has a reward and is not filtered as overlong; the others leave baseline and loss."""
    filtered = selection.overlong is Overlong.filter
    return [score.failure is None and not (filtered and score.truncated) for score in scores]


def with_length_penalty(
    scores: Sequence[Score], lengths: Sequence[int], selection: SelectionConfig, max_tokens: int
) -> list[Score]:
    """Scores whose reward includes what an answer of that many tokens pays. For advantages: statistics keep the task's."""
    pairs = zip(scores, lengths, strict=True)
    return [replace(score, reward=score.reward + overlong_reward(n, selection, max_tokens)) for score, n in pairs]


def enough(prompt_ids: Sequence[str], scores: Sequence[Score], count: int, selection: SelectionConfig) -> bool:
    """Whether no further round of generation is asked for: `count` wanted groups, or nothing is ever replaced."""
    if not replaces(selection):
        return True
    return len(wanted(sort_groups(_graded(prompt_ids, scores, selection), selection), selection)) >= count


def select_groups(prompt_ids: Sequence[str], scores: Sequence[Score], count: int, selection: SelectionConfig) -> Selected:
    """The `count` groups to train on. ValueError when fewer were drawn."""
    order = list(group_indices(prompt_ids))
    if len(order) < count:
        raise ValueError(f"{len(order)} groups were drawn, {count} are needed")
    graded = _graded(prompt_ids, scores, selection)
    groups = sort_groups(graded, selection)
    chosen, filling = choose_groups(groups, order, count, selection)
    facts = _sample_facts(graded, scores, chosen)
    if replaces(selection):
        facts |= {
            "dynsamp/gen_batches": len(order) / count,
            "dynsamp/dropped_all_wrong": float(len(set(groups.all_wrong) - set(chosen))),
            "dynsamp/dropped_all_right": float(len(set(groups.all_right) - set(chosen))),
            "dynsamp/dropped_one_reward": float(len(set(groups.one_reward) - set(chosen))),
            "dynsamp/filling_groups": float(filling),
            "drop/pass_rate_groups": float(len(set(groups.outside) - set(chosen))),
            "drop/surplus_groups": float(len(set(wanted(groups, selection)) - set(chosen))),
        }
    return Selected(tuple(chosen), facts)


def _graded(prompt_ids: Sequence[str], scores: Sequence[Score], selection: SelectionConfig) -> Graded:
    return Graded(
        prompt_ids=prompt_ids,
        rewards=[score.reward for score in scores],
        correct=[score.correct for score in scores],
        usable=usable_samples(scores, selection),
    )


def _sample_facts(graded: Graded, scores: Sequence[Score], chosen: Sequence[str]) -> dict[str, float]:
    """drop/overlong_frac: answers that have a reward and were filtered. The group/* are over the groups trained on."""
    groups = group_indices(graded.prompt_ids)
    survivors = [[i for i in groups[name] if graded.usable[i]] for name in chosen]
    overlong = sum(score.failure is None and not ok for score, ok in zip(scores, graded.usable, strict=True))
    unanimous = sum(len({graded.rewards[i] for i in one}) <= 1 for one in survivors)
    return {
        "drop/overlong_frac": overlong / len(scores),
        "group/effective_size": sum(map(len, survivors)) / len(survivors),
        "group/zero_var_frac_trained": unanimous / len(survivors),
    }
