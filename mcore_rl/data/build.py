"""From the task section of a configuration to a task. Every error comes here, before any rank or engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mcore_rl.config.reward import RewardConfig
from mcore_rl.config.schema import TaskConfig, TaskKind
from mcore_rl.data.arithmetic import Walk
from mcore_rl.data.band_file import different_conditions, read_band
from mcore_rl.data.band_task import FREE_IN_TRAINING, BandTask, task_conditions
from mcore_rl.data.countdown import Countdown
from mcore_rl.data.file_task import FileTask, SameValue
from mcore_rl.data.intake import take_in
from mcore_rl.data.procedural import Demonstrations, ProceduralTask
from mcore_rl.data.render import Renderer
from mcore_rl.rewards.composition import Composition
from mcore_rl.rewards.grading import DECIMAL, EXPRESSION, INTEGER, Grader
from mcore_rl.rewards.judge import MathJudge

BuiltTask = ProceduralTask | FileTask | BandTask


def build_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    reward: RewardConfig | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_tokens: int | None = None,
) -> BuiltTask:
    """The task. template_kwargs: model.chat_template_kwargs. max_prompt_tokens: longer prompts of a file are dropped.

    ValueError naming the key, or the file, line and key, that is wrong.
    """
    renderer = Renderer(tokenizer, config.system_prompt, config.prompt_suffix, template_kwargs or {})
    made = _base_task(config, renderer, _composition(reward), seed=seed, max_prompt_tokens=max_prompt_tokens)
    return made if config.band_file is None else _banded(config, made, seed=seed)


def _base_task(
    config: TaskConfig, renderer: Renderer, composition: Composition, *, seed: int, max_prompt_tokens: int | None
) -> ProceduralTask | FileTask:
    """The task over all of its training prompts."""
    if config.kind is TaskKind.file:
        grader = _grader(config, DECIMAL, SameValue(MathJudge()), composition)
        return FileTask(take_in(config), grader, renderer, seed, max_prompt_tokens)
    styles = Demonstrations(config.worked_share, config.worked_only_steps)
    if config.kind is TaskKind.countdown:
        game = Countdown(config.numbers, config.max_number)
        return ProceduralTask(game, _grader(config, EXPRESSION, game, composition), renderer, styles, seed)
    walk = Walk(config.min_terms, config.max_terms, MathJudge())
    return ProceduralTask(walk, _grader(config, INTEGER, walk, composition), renderer, styles, seed)


def _banded(config: TaskConfig, base: ProceduralTask | FileTask, *, seed: int) -> BandTask:
    """The task on the prompts of task.band_file. ValueError when that band was made under other conditions."""
    band = read_band(Path(str(config.band_file)))
    difference = different_conditions(band.conditions, task_conditions(config.kind.value, base), ignore=FREE_IN_TRAINING)
    if difference is not None:
        raise ValueError(f"task.band_file={config.band_file}: its pass rates are not of this task: {difference}")
    return BandTask(base, band, seed, f"task.band_file={config.band_file}")


def _composition(reward: RewardConfig | None) -> Composition:
    if reward is None:
        return Composition()
    return Composition(reward.form, reward.partial_credit, reward.length_cost_per_token)


def _grader(config: TaskConfig, body: str, source: Walk | Countdown | SameValue, composition: Composition) -> Grader:
    """The grader of a task: its slot, what an answer looks like, its own notion of equal, and what it earns."""
    return Grader(config.answer_pattern, body, config.require_full_format, source.equal, composition)
