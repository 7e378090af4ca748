"""On-policy distillation: the student answers, the teacher says what it would have chosen at every token, and the student's
distribution moves there. No reward takes part; the task's verdict is logged beside the divergence.

Every step ends with a proved sync, as in RL, so the answers are always those of the weights that learn from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mcore_rl.batching import RolloutBatch, build_rollout_batch, split_updates, train_batch
from mcore_rl.config.algorithm import AlgorithmConfig, Baseline, Overlong, SelectionConfig
from mcore_rl.config.distill import DistillConfig
from mcore_rl.engine_calls import rest
from mcore_rl.rollout.teacher import Teacher
from mcore_rl.run import Run
from mcore_rl.stages import draw_prompts, record, roll_out, score, sync, with_old_logprobs
from mcore_rl.step_metrics import StepOutcome
from mcore_rl.types import Completion, TeacherTopK, TrainBatch, UpdateReport
from parallel.collectives import on_rank0


@dataclass
class Flatness:
    """Whether the divergence has stopped falling (over-distillation begins there)."""

    config: DistillConfig
    seen: list[float] = field(default_factory=list[float])

    def add(self, kl_nats: float) -> bool:
        """Enter a step's mean divergence; True once the last flat_steps of them are flat."""
        self.seen.append(kl_nats)
        window = self.config.flat_steps
        if window == 0 or len(self.seen) < window:
            return False
        older, newer = self.seen[-window : -(window // 2)], self.seen[-(window // 2) :]
        return sum(older) / len(older) - sum(newer) / len(newer) < self.config.flat_nats


def distill(run: Run, teacher: Teacher | None) -> int:
    """Distill for `config.train.steps` rollout batches or until the divergence is flat; the number of steps taken.

    teacher: on rank 0. Collective over the trainer's ranks. Raises what a training step raises, and EngineDied for the
    teacher, which is not replaced.
    """
    algorithm = grouping(run.config.algorithm)
    flat = Flatness(run.config.distill)
    for step in range(run.config.train.steps):
        prompts = draw_prompts(run, step)
        completions = roll_out(run, prompts, step)
        scores = score(run, prompts, completions)
        rest(run)
        rollout = build_rollout_batch(
            prompts,
            completions,
            scores,
            algorithm=algorithm,
            version=run.policy.weights().version,
            samples_per_prompt=run.config.train.samples_per_prompt,
        )
        updates = taught(run, teacher, rollout, completions, step)
        with run.clock.stage("update"):
            reports = [run.policy.update(batch) for batch in updates]
        synced = sync(run)
        record(run, step, StepOutcome(prompts, completions, scores, rollout, updates, reports, synced))
        if flat.add(divergence(reports, updates)):
            if run.progress is not None:
                run.progress.line(f"the divergence is flat over {run.config.distill.flat_steps} steps: done after {step + 1}")
            return step + 1
    return run.config.train.steps


def grouping(algorithm: AlgorithmConfig) -> AlgorithmConfig:
    """Only the aggregation matters here: no baseline, no selection, every answer is learned from."""
    return replace(algorithm, baseline=Baseline.none, selection=SelectionConfig(overlong=Overlong.keep))


def taught(
    run: Run, teacher: Teacher | None, rollout: RolloutBatch, completions: Sequence[Completion], step: int
) -> tuple[TrainBatch, ...]:
    """The updates of a rollout batch, each with the teacher's opinion of its tokens. Collective."""
    config, train = run.config, run.config.train
    with run.clock.stage("teacher"):
        opinion = teacher_opinion(teacher, rollout, completions)
    parts = split_updates(rollout.prompt_ids, train.updates_per_batch, seed=config.seed, step=step)
    algorithm = grouping(config.algorithm)
    updates = [
        replace(
            train_batch(rollout, part, algorithm, old=None),
            teacher=TeacherTopK(tuple(opinion.ids[i] for i in part), tuple(opinion.logprobs[i] for i in part)),
        )
        for part in parts
    ]
    return with_old_logprobs(run, updates)


def teacher_opinion(teacher: Teacher | None, rollout: RolloutBatch, completions: Sequence[Completion]) -> TeacherTopK:
    """Of all sequences, aligned with their tokens: asked on rank 0, the same on every rank."""

    def ask() -> list[tuple[list[list[int]], list[list[float]]]]:
        if teacher is None:
            raise RuntimeError("rank 0 has no teacher to ask")
        return [(one.ids.tolist(), one.logprobs.tolist()) for one in teacher.judge(completions)]

    found = on_rank0(ask)
    lengths = [ids.numel() for ids in rollout.tokens.token_ids]
    ids = tuple(_aligned(torch.tensor(ids, dtype=torch.int64), length) for (ids, _), length in zip(found, lengths, strict=True))
    logprobs = tuple(_aligned(torch.tensor(values), length) for (_, values), length in zip(found, lengths, strict=True))
    return TeacherTopK(ids, logprobs)


def _aligned(response: Tensor, length: int) -> Tensor:
    """[n, K] of the last n tokens -> [length, K], zeros on the prompt."""
    return torch.cat([response.new_zeros(length - len(response), response.shape[1]), response])


def divergence(reports: Sequence[UpdateReport], updates: Sequence[TrainBatch]) -> float:
    """Mean reverse KL of a step's trained tokens, nats."""
    counts = [sum(int(mask.sum()) for mask in batch.tokens.loss_mask) for batch in updates]
    total = sum(report.metrics["teacher_kl_nats"] * count for report, count in zip(reports, counts, strict=True))
    return total / sum(counts)
