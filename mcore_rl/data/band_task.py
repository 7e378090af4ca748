"""A task trained on the prompts of a band file alone; evaluation, demonstrations and verdicts are the task's own."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from mcore_rl.data.band_file import FIRST_ROW_LINE, Band, BandRow, Conditions
from mcore_rl.data.file_task import FileTask, shuffled_order
from mcore_rl.data.procedural import ProceduralTask
from mcore_rl.data.render import Renderer
from mcore_rl.rewards.grading import Grader
from mcore_rl.types import Completion, Prompt, Score

# What a training run may change against the probe: how it samples and its seed. The model is compared when it is known.
FREE_IN_TRAINING = ("seed", "model_digest", "samples", "temperature", "max_tokens")


@dataclass(frozen=True)
class BandTask:
    """types.Task over a task and a band of its training questions."""

    base: FileTask | ProceduralTask
    band: Band
    seed: int
    source: str = "task.band_file"

    def __post_init__(self) -> None:
        """ValueError when the band is empty, holds a question that is not one of the task's training questions, or
        another answer to one. source: the setting that is named then.
        """
        if not self.band.rows:
            raise ValueError(f"{self.source}: none of its {self.band.probed} probed prompts is in the band")
        answers = [self.base.training_answer(row.question) for row in self.band.rows]
        foreign = [row.question for row, answer in zip(self.band.rows, answers, strict=True) if answer is None]
        if foreign:
            raise ValueError(
                f"{self.source}: {len(foreign)} of its questions are not training questions of this task (held out, or of "
                f"other data), for example {foreign[0]!r}"
            )
        for line, (row, answer) in enumerate(zip(self.band.rows, answers, strict=True), start=FIRST_ROW_LINE):
            if row.answer != answer:
                raise ValueError(
                    f"{self.source}, line {line}: the answer to {row.question!r} is {row.answer!r} there and {answer!r} "
                    "in this task; probe again"
                )

    @property
    def grader(self) -> Grader:
        """The task's own."""
        return self.base.grader

    @property
    def renderer(self) -> Renderer:
        """The task's own."""
        return self.base.renderer

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        band = {"rows": len(self.band.rows), "probed": self.band.probed, "low": self.band.low, "high": self.band.high}
        return {**self.base.facts(), "band": band}

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """`count` prompts of the band for rollout batch `step`, ids `s<step>-p<i>`; each row once per epoch."""
        rows = [self._at(step * count + i) for i in range(count)]
        return [self.renderer.prompt(f"s{step}-p{i}", row.question, row.answer) for i, row in enumerate(rows)]

    def probe_prompts(self, first: int, count: int) -> list[Prompt]:
        """The task's own: a probe looks at all of its training prompts, not at an earlier band."""
        return self.base.probe_prompts(first, count)

    def eval_prompts(self, split: str, count: int) -> list[Prompt]:
        """The task's own."""
        return self.base.eval_prompts(split, count)

    def demonstrations(self, step: int, count: int) -> list[tuple[Prompt, tuple[int, ...]]]:
        """The task's own."""
        return self.base.demonstrations(step, count)

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """The task's own."""
        return self.base.score(prompt, completion)

    def text(self, completion: Completion) -> str:
        """The task's own."""
        return self.base.text(completion)

    def _at(self, position: int) -> BandRow:
        """The row at a position of the endless shuffled stream."""
        epoch, index = divmod(position, len(self.band.rows))
        return self.band.rows[shuffled_order(f"{self.seed}/band/{epoch}", len(self.band.rows))[index]]


def rendering_sha256(renderer: Renderer) -> str:
    """Digest of one question rendered as every prompt is."""
    return hashlib.sha256(renderer.text("What is 1+1?").encode()).hexdigest()


def task_conditions(kind: str, task: FileTask | ProceduralTask | BandTask) -> Conditions:
    """The conditions that a task alone knows; the rest is filled in by who samples."""
    return Conditions(kind, 0, task.grader.mode, rendering_sha256(task.renderer), "", 0, 0.0, 0)
