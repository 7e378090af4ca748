"""A task read from files. Training goes through all rows in a shuffled order, epoch after epoch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from mcore_rl.data.intake import Intake
from mcore_rl.data.problem import Problem
from mcore_rl.data.render import Renderer
from mcore_rl.data.splits import require_split
from mcore_rl.rewards.extraction import write_slot
from mcore_rl.rewards.grading import Grader
from mcore_rl.rewards.judge import MathJudge
from mcore_rl.rewards.values import same_value
from mcore_rl.types import Completion, Prompt, Score


@dataclass(frozen=True)
class SameValue:
    """Equality with the reference by value."""

    judge: MathJudge

    def equal(self, extracted: str, prompt: Prompt) -> bool:
        """Same value as the reference."""
        return same_value(extracted, prompt.answer, self.judge)


@lru_cache(maxsize=8)
def shuffled_order(stream: str, count: int) -> tuple[int, ...]:
    """A permutation of range(count), a function of the stream's name alone."""
    order = list(range(count))
    random.Random(stream).shuffle(order)
    return tuple(order)


@dataclass(frozen=True)
class FileTask:
    """types.Task over the problems of files. max_prompt_tokens drops longer prompts (counted in `dropped`)."""

    intake: Intake
    grader: Grader
    renderer: Renderer
    seed: int
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        """ValueError when no training prompt is left."""
        if not self.kept["train"]:
            raise ValueError(
                f"no prompts left for training: {len(self.problems['train'])} rows in the split, "
                f"{self.dropped} prompts over {self.max_prompt_tokens} tokens"
            )

    @property
    def problems(self) -> dict[str, list[Problem]]:
        """By split, before any is dropped for its length."""
        return self.intake.problems

    @cached_property
    def kept(self) -> dict[str, list[Problem]]:
        """Problems by split whose prompts fit."""
        return {split: [p for p in problems if self._fits(p)] for split, problems in self.problems.items()}

    @property
    def dropped(self) -> int:
        """Prompts left out because they are too long."""
        return sum(map(len, self.problems.values())) - sum(map(len, self.kept.values()))

    def facts(self) -> dict[str, Any]:
        """For the manifest: problems by split, and what was left out by reason."""
        sizes = {split: len(problems) for split, problems in self.kept.items()}
        return {"problems": sizes, "dropped": {**self.intake.dropped, "too_long_prompts": self.dropped}}

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """`count` training prompts of rollout batch `step`, ids `s<step>-p<i>`; each row once per epoch."""
        return [self._prompt(f"s{step}-p{i}", self._at("epoch", step * count + i)) for i in range(count)]

    def probe_prompts(self, first: int, count: int) -> list[Prompt]:
        """Distinct training prompts `probe-p<i>`, i from `first`: those that training meets first.

        ValueError when the split has fewer.
        """
        most = len(self.kept["train"])
        if first + count > most:
            raise ValueError(f"data_gate.prompts={first + count}: only {most} training prompts are left")
        return [self._prompt(f"probe-p{i}", self._at("epoch", i)) for i in range(first, first + count)]

    def eval_prompts(self, split: str, count: int) -> list[Prompt]:
        """The first `count` problems of the split. ValueError when it has fewer."""
        require_split(split)
        problems = self.kept[split]
        if len(problems) < count:
            raise ValueError(f"no prompts left: split '{split}' has {len(problems)} problems, {count} were asked (eval.prompts)")
        return [self._prompt(f"{split}-p{i}", problem) for i, problem in enumerate(problems[:count])]

    def demonstrations(self, step: int, count: int) -> list[tuple[Prompt, tuple[int, ...]]]:
        """Prompts `sft<step>-p<i>` with the file's own solution, annotations removed, and the answer in its slot."""
        pairs: list[tuple[Prompt, tuple[int, ...]]] = []
        for i in range(count):
            problem = self._at("sft-epoch", step * count + i)
            text = f"{problem.worked}\n{write_slot(self.grader.pattern, problem.shown)}".lstrip("\n")
            pairs.append((self._prompt(f"sft{step}-p{i}", problem), self.renderer.response(text)))
        return pairs

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The grader's verdict on a completion; only one that ended by itself can be right."""
        text, stopped = self.renderer.read(completion)
        return self.grader.grade(prompt, text, stopped=stopped, n_tokens=len(completion.token_ids))

    def text(self, completion: Completion) -> str:
        """What was written, without the stop token."""
        return self.renderer.read(completion)[0]

    def training_answer(self, question: str) -> str | None:
        """The reference answer of a training question of this task; None for any other text."""
        return self._training_answers.get(question)

    @cached_property
    def _training_answers(self) -> dict[str, str]:
        return {problem.question: problem.answer for problem in self.kept["train"]}

    def _at(self, stream: str, position: int) -> Problem:
        """The training problem at a position of the endless shuffled stream."""
        problems = self.kept["train"]
        epoch, index = divmod(position, len(problems))
        return problems[shuffled_order(f"{self.seed}/{stream}/{epoch}", len(problems))[index]]

    def _fits(self, problem: Problem) -> bool:
        """Whether the prompt is short enough."""
        return self.max_prompt_tokens is None or len(self._prompt("", problem).token_ids) <= self.max_prompt_tokens

    def _prompt(self, prompt_id: str, problem: Problem) -> Prompt:
        """The problem as it is asked."""
        return self.renderer.prompt(prompt_id, problem.question, problem.answer)
