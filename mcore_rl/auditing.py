"""What a run writes into its audit log, on rank 0: every evaluation, and a few groups of every training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mcore_rl.audit import AuditContext, audit_record, audited_groups
from mcore_rl.evaluate import Observer
from mcore_rl.run import Run
from mcore_rl.step_metrics import StepOutcome
from mcore_rl.types import Completion, Prompt, Score

MEASURED = ("advantage", "delta_max_abs_nats")


def audit_context(run: Run, phase: str, step: int) -> AuditContext:
    """What all records of one look have in common."""
    task = run.config.task
    dataset = task.kind.value if task.train_file is None else f"{task.kind.value}:{task.train_file}"
    return AuditContext(run.config.name, dataset, phase, step, run.reward_version, run.extraction)


def auditor(run: Run, phase: str) -> Observer | None:
    """Writes every sample of an evaluation; None where there is no audit log (the other ranks)."""
    if run.audit is None:
        return None
    log, context = run.audit, audit_context(run, phase, len(run.log_rows))

    def observe(prompts: Sequence[Prompt], completions: Sequence[Completion], scores: Sequence[Score]) -> None:
        by_id = {prompt.prompt_id: prompt for prompt in prompts}
        log.write(
            [
                audit_record(context, run.task, prompt=by_id[c.prompt_id], completion=c, score=score)
                for c, score in zip(completions, scores, strict=True)
            ]
        )

    return observe


def audit_step(run: Run, step: int, outcome: StepOutcome, records: Sequence[Mapping[str, object]]) -> None:
    """The audited groups of a training step. records: its rollout records, in the order of the completions."""
    if run.audit is None:
        return
    context = audit_context(run, "train", step)
    names = [completion.prompt_id for completion in outcome.completions]
    chosen = audited_groups(names, run.config.telemetry.audited_groups, seed=run.config.seed, step=step)
    by_id = {prompt.prompt_id: prompt for prompt in outcome.prompts}
    found = [
        audit_record(
            context,
            run.task,
            prompt=by_id[completion.prompt_id],
            completion=completion,
            score=score,
            measured={name: record[name] for name in MEASURED},
        )
        for completion, score, record in zip(outcome.completions, outcome.scores, records, strict=True)
        if completion.prompt_id in chosen
    ]
    run.audit.write(found, left_out={"train": len(names) - len(found)})
