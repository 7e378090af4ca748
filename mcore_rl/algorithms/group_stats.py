"""What the groups of a rollout batch look like, on the task reward, before any filter.

A group is unanimous when all its rewards are the same value: it teaches nothing. all_wrong and all_right are told by
the verdict `correct`, not by the reward (a wrong answer may pay something).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from mcore_rl.algorithms.advantages import checked_rewards, group_indices


def group_statistics(
    rewards: Sequence[float | None], correct: Sequence[bool], prompt_ids: Sequence[str], sample_ids: Sequence[str]
) -> dict[str, float]:
    """Means over samples and shares of groups.

    reward_mean, reward_std: over all samples (population). reward_group_std: mean over groups of the population std.
    zero_var_frac: groups of one reward value. all_wrong_frac, all_right_frac: groups of one verdict.
    reward_mean_mixed: mean reward over the groups that are not unanimous, NaN if there is none. accuracy: share correct.
    """
    values = checked_rewards(rewards, sample_ids)
    if len(correct) != values.numel():
        raise ValueError(f"{values.numel()} rewards but {len(correct)} verdicts")
    groups = list(group_indices(prompt_ids).values())
    unanimous = [bool((values[index] == values[index[0]]).all()) for index in groups]
    verdicts = [[correct[i] for i in index] for index in groups]
    mixed = [i for index, same in zip(groups, unanimous, strict=True) if not same for i in index]
    return {
        "reward_mean": float(values.mean()),
        "reward_std": _std(values),
        "reward_group_std": sum(_std(values[index]) for index in groups) / len(groups),
        "reward_mean_mixed": float(values[mixed].mean()) if mixed else math.nan,
        "accuracy": sum(correct) / len(correct),
        "zero_var_frac": sum(unanimous) / len(groups),
        "all_wrong_frac": sum(not any(group) for group in verdicts) / len(groups),
        "all_right_frac": sum(all(group) for group in verdicts) / len(groups),
        "groups": float(len(groups)),
    }


def _std(values: Tensor) -> float:
    """Population std; exactly 0 for equal values."""
    return 0.0 if bool((values == values[0]).all()) else float(values.std(correction=0))
