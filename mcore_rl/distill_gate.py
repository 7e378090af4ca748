"""Stage 0 of a distillation: is this teacher worth listening to? Asked once, before the first update.

A teacher that is not ahead of its student teaches noise, and a quantised one may teach its rounding: both are measured on
validation prompts with the run's own grading, and the run stops when either is not as the configuration asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mcore_rl.algorithms.divergence import TopList, list_kl
from mcore_rl.evaluate import EvalSpec, evaluate
from mcore_rl.held_out import evaluate_on_rank0, evaluation_spec
from mcore_rl.rollout.teacher import Teacher, start_teacher
from mcore_rl.run import Run
from mcore_rl.types import SamplingParams, StopRun
from parallel.collectives import on_rank0


@dataclass(frozen=True)
class TeacherGate:
    """Greedy accuracy on the same validation prompts; quantisation_kl_nats: None where no full teacher was asked."""

    prompts: int
    teacher_accuracy: float
    student_accuracy: float
    quantisation_kl_nats: float | None = None

    @property
    def lead(self) -> float:
        """Teacher minus student."""
        return self.teacher_accuracy - self.student_accuracy


def teacher_gate(run: Run, teacher: Teacher | None) -> TeacherGate:
    """Measure and judge. teacher: on rank 0. StopRun, with the figures, for a teacher that must not be used; collective."""
    distill = run.config.distill
    student = evaluate_on_rank0(run, split="val", count=distill.gate_prompts, temperature=0.0)
    spec = evaluation_spec(run, split="val", count=distill.gate_prompts, temperature=0.0)
    found = TeacherGate(**on_rank0(lambda: _asked(run, _present(teacher), spec, student.accuracy)))
    if found.lead < distill.min_lead:
        raise StopRun(
            f"distill.min_lead={distill.min_lead}: the teacher answers {found.teacher_accuracy:.3f} of {found.prompts} "
            f"validation prompts, the student {found.student_accuracy:.3f}; a teacher that is ahead by that much is needed"
        )
    kl = found.quantisation_kl_nats
    if kl is not None and not kl <= distill.gate_max_kl_nats:
        raise StopRun(
            f"distill.gate_max_kl_nats={distill.gate_max_kl_nats}: {distill.teacher} is {kl:.4f} nats from "
            f"{distill.full_teacher} on the student's answers; use the full teacher or a finer quantisation"
        )
    return found


def _present(teacher: Teacher | None) -> Teacher:
    if teacher is None:
        raise RuntimeError("the teacher was asked for on a rank that does not own it; only rank 0 does")
    return teacher


def _asked(run: Run, teacher: Teacher, spec: EvalSpec, student_accuracy: float) -> dict[str, Any]:
    accuracy = evaluate(run.task, teacher, spec, reward=run.reward).accuracy
    return asdict(TeacherGate(spec.prompts, accuracy, student_accuracy, _quantisation(run, teacher, spec)))


def _quantisation(run: Run, teacher: Teacher, spec: EvalSpec) -> float | None:
    """Mean KL, nats per answered token, between the full teacher and the one in use; the full one lives for this only."""
    path = run.config.distill.full_teacher
    if path is None:
        return None
    prompts = run.task.eval_prompts(spec.split, spec.prompts)
    answers = run.sampler().generate(prompts, SamplingParams(0.0, spec.max_tokens, spec.stop_token_ids, seed=spec.seed))
    full = start_teacher(run.config, path, run.folder.logs / "full_teacher.log", vocab_size=teacher.vocab_size)
    try:
        return mean_kl(full.judge(answers), teacher.judge(answers))
    finally:
        full.close()


def mean_kl(full: Sequence[TopList], used: Sequence[TopList]) -> float:
    """KL(full || used) per answered token, nats, as far as the two lists tell."""
    parts = [list_kl(one, other).kl for one, other in zip(full, used, strict=True)]
    return float(torch.cat(parts).mean())
