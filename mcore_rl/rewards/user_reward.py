"""A reward function of your own (`reward.function=package.module:name`), called in processes that can be ended.

    def name(sample: dict) -> float | dict

`sample` has sample_id, question, answer, text (without the stop token), n_tokens, finish_reason, and the task's own
view: extracted, format_ok, correct, goal. The function returns the reward, or a dict with some of

    reward      a number, taken as it is; or
    goal        F1 in [0, 1], composed with the components by reward.form (the correctness gate)
    components  name -> number: auxiliary terms (with goal) or a record of what the reward is made of (with reward)
    correct     true or false: the verdict, where the task's own is not the one that counts

A result that is None, NaN, infinite or of another type stops the run and names the sample. A call that takes longer than
reward.timeout_s, ends its process or raises drops its sample: no reward, out of its group's statistics and baseline, no
trained token, counted under drop/reward_timeout, drop/reward_crash, drop/reward_error. The other samples of the group
have the advantages of the group without it. More than reward.max_failed_frac of a batch: the run stops.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from mcore_rl.config.reward import RewardConfig, RewardForm
from mcore_rl.errors import StopRun
from mcore_rl.rewards.composition import GOAL, LARGEST, compose, shown, usable
from mcore_rl.rewards.pool import Reply, RewardPool
from mcore_rl.rewards.process import CallSpec
from mcore_rl.types import Completion, Prompt, Score

logger = logging.getLogger(__name__)

KEYS = frozenset({"reward", "goal", "components", "correct"})
WARNED_FAILURES = 3


class UserReward:
    """The function and its processes. Not shared between threads."""

    def __init__(self, config: RewardConfig, log: Path | None = None) -> None:
        """Start one process, so that a function that cannot be loaded is a ValueError now. log: gets what it prints."""
        self.config = config
        memory_bytes = int(config.memory_gib * 1024**3)
        self._pool = RewardPool(CallSpec(str(config.function), config.timeout_s, memory_bytes, log=log), config.workers)
        try:
            self.source_sha256 = self._pool.check()
        except RuntimeError as error:
            raise ValueError(f"reward.function={config.function}: {error}") from error

    @property
    def version(self) -> str:
        """For reward_version: the function and the beginning of its file's digest."""
        return f"{self.config.function}#{self.source_sha256[:12]}"

    def apply(self, samples: Sequence[tuple[Prompt, Completion, str]], scores: Sequence[Score]) -> list[Score]:
        """The task's scores with the function's rewards. samples: prompt, completion and its text, one per score.

        ValueError names the sample whose result is no reward. StopRun when too many calls failed.
        """
        arguments = [_argument(prompt, done, text, score) for (prompt, done, text), score in zip(samples, scores, strict=True)]
        replies = self._pool.ask_all(arguments)
        self._check_failures([argument["sample_id"] for argument in arguments], replies)
        triples = zip(arguments, scores, replies, strict=True)
        return [scored(argument["sample_id"], score, reply, self.config.form) for argument, score, reply in triples]

    def close(self) -> None:
        """End the processes. Twice is fine."""
        self._pool.close()

    def _check_failures(self, names: Sequence[str], replies: Sequence[Reply]) -> None:
        """Warn of the first few; StopRun when more than the allowed share of the batch failed."""
        failed = [(name, reply) for name, reply in zip(names, replies, strict=True) if reply.failure not in (None, "unusable")]
        for name, reply in failed[:WARNED_FAILURES]:
            logger.warning("reward of sample %s dropped (%s): %s", name, reply.failure, reply.detail)
        if len(failed) > self.config.max_failed_frac * len(replies):
            counts = dict(Counter(str(reply.failure) for _, reply in failed))
            raise StopRun(
                f"reward.function={self.config.function}: {len(failed)} of {len(replies)} calls failed {counts}, more than "
                f"reward.max_failed_frac={self.config.max_failed_frac}; first: sample {failed[0][0]}, {failed[0][1].detail}"
            )


def scored(name: str, score: Score, reply: Reply, form: RewardForm) -> Score:
    """The score of one sample with what the function said. ValueError naming the sample when that is no reward."""
    if reply.failure == "unusable":
        raise ValueError(f"reward of sample {name} is {reply.detail}: a number or a dict is needed")
    if reply.failure is not None:
        return replace(score, reward=math.nan, components={}, failure=reply.failure)
    if not isinstance(reply.value, Mapping):
        return replace(score, reward=_number(name, "reward", reply.value))
    result = cast(Mapping[str, Any], reply.value)
    if set(result) - KEYS or ("reward" in result) == ("goal" in result):
        raise ValueError(
            f"reward of sample {name} has the keys {sorted(result)}: one of reward and goal, besides components, correct"
        )
    terms = _terms(name, result.get("components", {}))
    correct = result.get("correct", score.correct)
    if not isinstance(correct, bool):
        raise ValueError(f"reward of sample {name}: correct is {correct!r}; true or false is needed")
    if "reward" in result:
        return replace(score, reward=_number(name, "reward", result["reward"]), correct=correct, components=terms)
    return _composed(name, replace(score, correct=correct, goal=_number(name, "goal", result["goal"])), terms, form)


def _composed(name: str, score: Score, terms: dict[str, float], form: RewardForm) -> Score:
    """The function's goal and terms, with the built-in terms, behind the gate."""
    built_in = {term: value for term, value in score.components.items() if term != GOAL}
    everything = {**built_in, **terms}
    try:
        reward = compose(form, score.goal, everything)
    except ValueError as error:
        raise ValueError(f"reward of sample {name}: {error}") from error
    return replace(score, reward=reward, components={GOAL: score.goal, **everything})


def _terms(name: str, components: object) -> dict[str, float]:
    if not isinstance(components, Mapping):
        raise ValueError(f"reward of sample {name}: components is {components!r}; name -> number is needed")
    found = cast(Mapping[str, Any], components)
    return {term: _number(name, f"component {term}", value) for term, value in found.items()}


def _number(name: str, what: str, value: object) -> float:
    if not usable(value):
        raise ValueError(f"{what} of sample {name} is {shown(value)}: a finite number is needed, {LARGEST:g} at most")
    return float(value)


def _argument(prompt: Prompt, completion: Completion, text: str, score: Score) -> dict[str, Any]:
    """What the function sees: builtins only."""
    return {
        "sample_id": completion.sample_id,
        "question": prompt.question,
        "answer": prompt.answer,
        "text": text,
        "n_tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "extracted": score.extracted,
        "format_ok": score.format_ok,
        "correct": score.correct,
        "goal": score.goal,
    }
