"""Held-out evaluation through a rollout engine: the same prompts, decoding and extraction before and after training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.rewards.checks import score_completions
from mcore_rl.rewards.grading import REWARD_VERSION
from mcore_rl.rewards.user_reward import UserReward
from mcore_rl.seams import Answerer, Task
from mcore_rl.statistics import PairedGain, paired_bootstrap, wilson_half_width
from mcore_rl.types import Completion, Prompt, SamplingParams, Score, StaleRollout

Observer = Callable[[Sequence[Prompt], Sequence[Completion], Sequence[Score]], None]


@dataclass(frozen=True)
class EvalSpec:
    """Conditions of an evaluation. temperature 0 is greedy. extraction: name of the extraction mode, for the record."""

    split: str
    prompts: int
    temperature: float
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    extraction: str
    seed: int = 0
    reward_version: str = REWARD_VERSION

    @property
    def decoding(self) -> str:
        """greedy, or the temperature."""
        return "greedy" if self.temperature == 0 else f"temperature {self.temperature:g}"


@dataclass(frozen=True)
class EvalResult:
    """One evaluation with its conditions. Rates are fractions of n; `correct` holds 0 or 1 per prompt, in prompt order.

    version: of the weights that sampled. extracted_rate: an answer was found, ended or not; format_rate: and it ended.
    reward_failures: samples whose reward call failed; they count in n with the task's own verdict, not in mean_reward.
    """

    split: str
    n: int
    decoding: str
    max_tokens: int
    extraction: str
    reward_version: str
    version: int
    accuracy: float
    ci95_half_width: float
    format_rate: float
    extracted_rate: float
    truncation_rate: float
    mean_reward: float
    mean_length_tokens: float
    prompt_ids: tuple[str, ...]
    correct: tuple[int, ...]
    reward_failures: int = 0

    def to_json(self) -> dict[str, Any]:
        """Builtins only."""
        return asdict(self) | {"prompt_ids": list(self.prompt_ids), "correct": list(self.correct)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> EvalResult:
        """The result that `to_json` wrote."""
        values: dict[str, Any] = {**record, "prompt_ids": tuple(record["prompt_ids"]), "correct": tuple(record["correct"])}
        return cls(**values)


def evaluate(
    task: Task,
    engine: Answerer,
    spec: EvalSpec,
    *,
    reward: UserReward | None = None,
    observe: Observer | None = None,
) -> EvalResult:
    """Sample one completion per held-out prompt and grade it. observe: sees what was asked, answered and judged.

    ValueError: no prompts, completions that do not match the prompts, unusable reward. StaleRollout: mixed versions.
    """
    if spec.prompts < 1:
        raise ValueError(f"eval.prompts={spec.prompts}: at least 1 is needed")
    prompts = task.eval_prompts(spec.split, spec.prompts)
    sampling = SamplingParams(spec.temperature, spec.max_tokens, spec.stop_token_ids, seed=spec.seed)
    completions = engine.generate(prompts, sampling)
    if [completion.prompt_id for completion in completions] != [prompt.prompt_id for prompt in prompts]:
        raise ValueError(f"evaluation asked {len(prompts)} prompts; the {len(completions)} completions are not theirs in order")
    versions = {completion.version for completion in completions}
    if len(versions) != 1:
        raise StaleRollout(f"evaluation completions of {engine.name} were sampled with versions {sorted(versions)}")
    scores = score_completions(task, prompts, completions, reward)
    if observe is not None:
        observe(prompts, completions, scores)
    return _result(spec, completions, scores)


def _result(spec: EvalSpec, completions: Sequence[Completion], scores: Sequence[Score]) -> EvalResult:
    """Rates and conditions of one evaluation."""
    n, correct = len(scores), tuple(int(score.correct) for score in scores)
    rewards = [score.reward for score in scores if score.failure is None]
    return EvalResult(
        split=spec.split,
        n=n,
        decoding=spec.decoding,
        max_tokens=spec.max_tokens,
        extraction=spec.extraction,
        reward_version=spec.reward_version,
        version=completions[0].version,
        accuracy=sum(correct) / n,
        ci95_half_width=wilson_half_width(sum(correct), n),
        format_rate=sum(score.format_ok for score in scores) / n,
        extracted_rate=sum(score.extracted is not None for score in scores) / n,
        truncation_rate=sum(score.truncated for score in scores) / n,
        mean_reward=sum(rewards) / len(rewards) if rewards else math.nan,
        mean_length_tokens=sum(len(completion.token_ids) for completion in completions) / n,
        prompt_ids=tuple(completion.prompt_id for completion in completions),
        correct=correct,
        reward_failures=n - len(rewards),
    )


def paired_gain(before: EvalResult, after: EvalResult, *, samples: int = 10_000, seed: int = 0) -> PairedGain:
    """Gain in accuracy with its interval. ValueError naming the condition in which the two evaluations differ."""
    for field in ("split", "n", "decoding", "max_tokens", "extraction", "reward_version", "prompt_ids"):
        left, right = asdict(before)[field], asdict(after)[field]
        if left != right:
            raise ValueError(f"evaluations are not comparable: {field} is {left!r} before and {right!r} after")
    return paired_bootstrap(before.correct, after.correct, samples=samples, seed=seed)
