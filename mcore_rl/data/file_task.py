"""A task read from files. Training goes through all rows in a shuffled order, epoch after epoch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mcore_rl.data.problem import Problem
from mcore_rl.data.render import Renderer
from mcore_rl.data.splits import require_split, split_of
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


def split_problems(train: Sequence[Problem], held_out: Sequence[Problem] | None) -> dict[str, list[Problem]]:
    """Problems by split, each question once. With an evaluation file, that is test and the hash only sets val apart.

    ValueError when a question of the evaluation file is also in the training file.
    """
    unique = {problem.question: problem for problem in train}
    if held_out is None:
        return {name: [p for p in unique.values() if split_of(p.question) == name] for name in ("train", "val", "test")}
    test = {problem.question: problem for problem in held_out}
    if shared := unique.keys() & test.keys():
        raise ValueError(
            f"task.eval_file: {len(shared)} of its questions are in task.train_file too, for example {min(shared)!r}"
        )
    val = [problem for problem in unique.values() if split_of(problem.question) == "val"]
    train_left = [problem for problem in unique.values() if split_of(problem.question) != "val"]
    return {"train": train_left, "val": val, "test": list(test.values())}


@dataclass(frozen=True)
class FileTask:
    """types.Task over the problems of files. max_prompt_tokens drops longer prompts (counted in `dropped`)."""

    problems: dict[str, list[Problem]]
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

    @cached_property
    def kept(self) -> dict[str, list[Problem]]:
        """Problems by split whose prompts fit."""
        return {split: [p for p in problems if self._fits(p)] for split, problems in self.problems.items()}

    @property
    def dropped(self) -> int:
        """Prompts left out because they are too long."""
        return sum(map(len, self.problems.values())) - sum(map(len, self.kept.values()))

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """`count` training prompts of rollout batch `step`, ids `s<step>-p<i>`; each row once per epoch."""
        return [self._prompt(f"s{step}-p{i}", self._at("epoch", step * count + i)) for i in range(count)]

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
        """1 for a right answer in its slot that ended by itself, else 0."""
        text, stopped = self.renderer.read(completion)
        return self.grader.grade(prompt, text, stopped=stopped)

    def _at(self, stream: str, position: int) -> Problem:
        """The training problem at a position of the endless shuffled stream."""
        problems = self.kept["train"]
        epoch, index = divmod(position, len(problems))
        order = list(range(len(problems)))
        random.Random(f"{self.seed}/{stream}/{epoch}").shuffle(order)
        return problems[order[index]]

    def _fits(self, problem: Problem) -> bool:
        """Whether the prompt is short enough."""
        return self.max_prompt_tokens is None or len(self._prompt("", problem).token_ids) <= self.max_prompt_tokens

    def _prompt(self, prompt_id: str, problem: Problem) -> Prompt:
        """The problem as it is asked."""
        return self.renderer.prompt(prompt_id, problem.question, problem.answer)
