"""`mcore-rl distill` once the configuration is valid and this process is a rank."""

from __future__ import annotations

from mcore_rl.algorithms.distill import distill_loss
from mcore_rl.assemble import Parts
from mcore_rl.config.schema import RunConfig
from mcore_rl.distill import distill
from mcore_rl.distill_gate import teacher_gate
from mcore_rl.facts import distill_facts
from mcore_rl.finish import export
from mcore_rl.held_out import look
from mcore_rl.jobs import announce, opened, sampled_policy
from mcore_rl.policy import MegatronPolicy
from mcore_rl.rollout.teacher import start_teacher
from mcore_rl.stages import sync


def run_distill(config: RunConfig) -> None:
    """Teacher gate, held-out look, distillation, held-out look, export, report. Collective."""
    with opened(config, distill_policy, distill_facts) as (parts, run, outcome):
        teacher = None
        if parts.engine is not None and config.distill.teacher is not None:
            log, size = parts.folder.logs / "teacher.log", parts.trainer.spec.vocab_size
            teacher = start_teacher(config, config.distill.teacher, log, vocab_size=size)
        try:
            sync(run)
            announce(run, "teacher gate", config.distill.gate_prompts)
            outcome.teacher_gate = teacher_gate(run, teacher)
            outcome.before = look(run, "before distillation")
            announce(run, "distillation", config.train.steps)
            run.clock.take_step()
            distill(run, teacher)
        finally:
            if teacher is not None:
                teacher.close()
        outcome.after = look(run, "after distillation")
        announce(run, "export")
        export(parts, run, outcome)


def distill_policy(parts: Parts) -> MegatronPolicy:
    """The student: its loss is the divergence from the teacher."""
    return sampled_policy(parts, distill_loss(parts.config.distill.entropy_coef))
