"""From the task section of a configuration to a task. Every error comes here, before any rank or engine starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerFast

from mcore_rl.config.schema import TaskConfig, TaskKind
from mcore_rl.data.arithmetic import Walk
from mcore_rl.data.countdown import Countdown
from mcore_rl.data.file_reader import read_problems
from mcore_rl.data.file_task import FileTask, SameValue, split_problems
from mcore_rl.data.procedural import Demonstrations, ProceduralTask
from mcore_rl.data.render import Renderer
from mcore_rl.rewards.grading import DECIMAL, EXPRESSION, INTEGER, Grader
from mcore_rl.rewards.judge import MathJudge

BuiltTask = ProceduralTask | FileTask


def build_task(
    config: TaskConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    seed: int,
    template_kwargs: Mapping[str, Any] | None = None,
    max_prompt_tokens: int | None = None,
) -> BuiltTask:
    """The task. template_kwargs: model.chat_template_kwargs. max_prompt_tokens: longer prompts of a file are dropped.

    ValueError naming the key, or the file, line and key, that is wrong.
    """
    renderer = Renderer(tokenizer, config.system_prompt, config.prompt_suffix, template_kwargs or {})
    if config.kind is TaskKind.file:
        return _file_task(config, renderer, seed=seed, max_prompt_tokens=max_prompt_tokens)
    styles = Demonstrations(config.worked_share, config.worked_only_steps)
    if config.kind is TaskKind.countdown:
        game = Countdown(config.numbers, config.max_number)
        return ProceduralTask(game, _grader(config, EXPRESSION, game), renderer, styles, seed)
    walk = Walk(config.min_terms, config.max_terms, MathJudge())
    return ProceduralTask(walk, _grader(config, INTEGER, walk), renderer, styles, seed)


def _file_task(config: TaskConfig, renderer: Renderer, *, seed: int, max_prompt_tokens: int | None) -> FileTask:
    """Read the files of a file task and split them."""
    if config.train_file is None:
        raise ValueError("task.train_file is not set: task.kind=file needs a JSONL or parquet file")
    held_out = None if config.eval_file is None else read_problems(config.eval_file)
    problems = split_problems(read_problems(config.train_file), held_out)
    grader = _grader(config, DECIMAL, SameValue(MathJudge()))
    return FileTask(problems, grader, renderer, seed, max_prompt_tokens)


def _grader(config: TaskConfig, body: str, source: Walk | Countdown | SameValue) -> Grader:
    """The grader of a task: its slot, what an answer looks like, and its own notion of equal."""
    return Grader(config.answer_pattern, body, config.require_full_format, source.equal)
