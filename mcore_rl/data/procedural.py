"""A task whose questions are drawn, not read: prompts are a function of (seed, step) alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mcore_rl.data.problem import Problem
from mcore_rl.data.render import Renderer
from mcore_rl.data.splits import require_split, split_of
from mcore_rl.rewards.extraction import write_slot
from mcore_rl.rewards.grading import Grader
from mcore_rl.types import Completion, Prompt, Score

DRAWS_WITHOUT_A_NEW_QUESTION = 3_000


class Generator(Protocol):
    """Draws problems and knows its own."""

    def draw(self, rng: random.Random) -> Problem:
        """A problem from this source of randomness alone."""
        ...

    def answer(self, question: str) -> str | None:
        """Reference answer of a question that it may draw; None for any other text."""
        ...


@dataclass(frozen=True)
class Demonstrations:
    """Supervised steps before worked_only_steps show the worked style only; later ones a worked_share of it."""

    worked_share: float
    worked_only_steps: int

    def __post_init__(self) -> None:
        """ValueError on a share outside 0..1 or a negative step count."""
        if not 0.0 <= self.worked_share <= 1.0 or self.worked_only_steps < 0:
            raise ValueError(
                f"task.worked_share={self.worked_share}, task.worked_only_steps={self.worked_only_steps}: "
                "need 0 <= worked_share <= 1 and worked_only_steps >= 0"
            )

    def share(self, step: int) -> float:
        """Probability that a demonstration of supervised step `step` is worked."""
        return 1.0 if step < self.worked_only_steps else self.worked_share


@dataclass(frozen=True)
class ProceduralTask:
    """types.Task over a generator. Held-out questions are the same for every seed, and never drawn for training."""

    generator: Generator
    grader: Grader
    renderer: Renderer
    styles: Demonstrations
    seed: int

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """`count` training prompts of rollout batch `step`, ids `s<step>-p<i>`."""
        drawn = self._draw("train", f"{self.seed}/train/{step}")
        return [self._prompt(f"s{step}-p{i}", next(drawn)) for i in range(count)]

    def probe_prompts(self, first: int, count: int) -> list[Prompt]:
        """Distinct training prompts `probe-p<i>`, i from `first`, from a stream of their own; the same whatever `first`.

        ValueError when the task has fewer different questions.
        """
        found = self._distinct("train", f"{self.seed}/probe", first + count)
        return [self._prompt(f"probe-p{i}", problem) for i, problem in enumerate(found) if i >= first]

    def eval_prompts(self, split: str, count: int) -> list[Prompt]:
        """`count` distinct prompts of val or test; a larger count begins with the smaller one's prompts."""
        require_split(split)
        found = self._distinct(split, f"eval/{split}", count)
        return [self._prompt(f"{split}-p{i}", problem) for i, problem in enumerate(found)]

    def demonstrations(self, step: int, count: int) -> list[tuple[Prompt, tuple[int, ...]]]:
        """Prompts `sft<step>-p<i>` with a worked or a direct answer, stop token last."""
        drawn = self._draw("train", f"{self.seed}/sft/{step}")
        style = random.Random(f"{self.seed}/sft-style/{step}")
        pairs: list[tuple[Prompt, tuple[int, ...]]] = []
        for i in range(count):
            problem = next(drawn)
            worked = bool(problem.worked) and style.random() < self.styles.share(step)
            slot = write_slot(self.grader.pattern, problem.shown)
            answer = f"{problem.worked} {slot}" if worked else slot
            pairs.append((self._prompt(f"sft{step}-p{i}", problem), self.renderer.response(answer)))
        return pairs

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The grader's verdict on a completion; only one that ended by itself can be right."""
        text, stopped = self.renderer.read(completion)
        return self.grader.grade(prompt, text, stopped=stopped, n_tokens=len(completion.token_ids))

    def text(self, completion: Completion) -> str:
        """What was written, without the stop token."""
        return self.renderer.read(completion)[0]

    def training_answer(self, question: str) -> str | None:
        """The answer of a question that may be drawn for training; None for any other text, held-out questions too."""
        return self.generator.answer(question) if split_of(question) == "train" else None

    def facts(self) -> dict[str, Any]:
        """For the manifest: questions are drawn, none is dropped."""
        return {"problems": "drawn", "dropped": {}}

    def _distinct(self, split: str, stream: str, count: int) -> list[Problem]:
        """The first `count` different questions of a stream. ValueError when it has fewer."""
        drawn, found, misses = self._draw(split, stream), dict[str, Problem](), 0
        while len(found) < count:
            problem = next(drawn)
            misses = misses + 1 if problem.question in found else 0
            if misses > DRAWS_WITHOUT_A_NEW_QUESTION:
                raise _exhausted(split, count, len(found))
            found[problem.question] = problem
        return list(found.values())

    def _prompt(self, prompt_id: str, problem: Problem) -> Prompt:
        """The problem as it is asked."""
        return self.renderer.prompt(prompt_id, problem.question, problem.answer)

    def _draw(self, split: str, stream: str) -> Iterator[Problem]:
        """Endless problems of one split from a named stream. ValueError when the split never comes up."""
        rng, misses = random.Random(stream), 0
        while True:
            problem = self.generator.draw(rng)
            if split_of(problem.question) == split:
                misses = 0
                yield problem
                continue
            misses += 1
            if misses > DRAWS_WITHOUT_A_NEW_QUESTION:
                raise _exhausted(split, 1, 0)


def _exhausted(split: str, count: int, found: int) -> ValueError:
    """The task is too easy to have that many different questions."""
    return ValueError(
        f"no prompts left: split '{split}' of this task has only {found} different questions, {count} were asked; "
        "make the task larger (task.max_terms, task.numbers, task.max_number) or ask for fewer (eval.prompts, data_gate.prompts)"
    )
