"""Scores of a whole batch, checked: a reward that is None, NaN or infinite stops the run and names the sample.

The one exception is a sample whose reward call failed and is marked so (`Score.failure`): it is dropped, with a count.
"""

from __future__ import annotations

from collections.abc import Sequence

from mcore_rl.rewards.composition import LARGEST, shown, usable
from mcore_rl.rewards.user_reward import UserReward
from mcore_rl.seams import Task
from mcore_rl.types import Completion, Prompt, Score


def require_reward(value: object, sample: str) -> float:
    """`value` as a float. ValueError naming the sample when it is no finite number (None, NaN, inf, text, bool) or too large."""
    if not usable(value):
        raise ValueError(f"reward of sample {sample} is {shown(value)}: a reward must be a finite number, {LARGEST:g} at most")
    return float(value)


def score_completions(
    task: Task, prompts: Sequence[Prompt], completions: Sequence[Completion], reward: UserReward | None = None
) -> list[Score]:
    """One Score per completion, in their order: the task's, with the rewards of `reward` where there is one.

    ValueError: unknown prompt id, sample given twice, unusable reward. StopRun: too many reward calls failed.
    """
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    if len(by_id) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts have only {len(by_id)} different ids: every occurrence needs its own")
    scores: list[Score] = []
    seen: set[str] = set()
    for completion in completions:
        name = completion.sample_id
        if completion.prompt_id not in by_id or name in seen:
            raise ValueError(f"completion {name}: {'given twice' if name in seen else 'its prompt was not asked'}")
        seen.add(name)
        scores.append(task.score(by_id[completion.prompt_id], completion))
    if reward is not None:
        scores = reward.apply([(by_id[c.prompt_id], c, task.text(c)) for c in completions], scores)
    for completion, score in zip(completions, scores, strict=True):
        if score.failure is None:
            require_reward(score.reward, completion.sample_id)
    return scores
