"""Supervised warm-up: response-only loss until answers parse and are sometimes right (no variance, no RL).

The schedule is fixed per seed. Every `check_every` steps the weights go to the engine and greedy validation answers are
scored; the first check inside the gate ends the stage. Never inside it: the run stops and says how close it came.
"""

from __future__ import annotations

from dataclasses import dataclass

from mcore_rl.batching import sft_batch
from mcore_rl.config.schema import SftConfig
from mcore_rl.held_out import evaluate_on_rank0
from mcore_rl.run import Run
from mcore_rl.stages import sync
from mcore_rl.types import StopRun


@dataclass(frozen=True)
class GateCheck:
    """One look at the gate: greedy accuracy and format share on validation prompts after `step` updates."""

    step: int
    accuracy: float
    format_rate: float

    def passes(self, config: SftConfig) -> bool:
        """Inside the accuracy window and parsing."""
        return config.min_accuracy <= self.accuracy <= config.max_accuracy and self.format_rate >= config.min_format


def warm_up(run: Run) -> GateCheck:
    """Train `run.policy` on demonstrations until the gate passes. StopRun if it never does; collective.

    Versions count up to 0 from minus the number of scheduled steps, so no warm-up version is ever an RL version.
    """
    config = run.config.sft
    checks: list[GateCheck] = []
    for step in range(config.steps):
        with run.clock.stage("sft"):
            report = run.policy.update(sft_batch(run.task.demonstrations(step, config.batch_size)))
        if run.progress is not None:
            run.progress.advance(f"warm-up loss {report.loss:.3f}", step + 1, config.steps)
        if is_check(config, step + 1):
            checks.append(check(run, step + 1))
            if checks[-1].passes(config):
                return checks[-1]
    seen = [(found.step, found.accuracy, found.format_rate) for found in checks[-4:]]
    raise StopRun(
        f"sft: in {config.steps} steps greedy validation accuracy was never inside [{config.min_accuracy}, "
        f"{config.max_accuracy}] with format >= {config.min_format}; last checks (step, accuracy, format): {seen}"
    )


def is_check(config: SftConfig, done: int) -> bool:
    """Whether the gate is looked at after `done` updates: from first_check_step on, every check_every, and at the end."""
    due = done >= config.first_check_step and (done - config.first_check_step) % config.check_every == 0
    return due or done == config.steps


def check(run: Run, step: int) -> GateCheck:
    """Sync, answer the validation prompts greedily, score them."""
    sync(run)
    with run.clock.stage("sft_check"):
        result = evaluate_on_rank0(run, split="val", count=run.config.sft.check_prompts, temperature=0.0)
    found = GateCheck(step, result.accuracy, result.format_rate)
    if run.progress is not None:
        run.progress.line(f"warm-up step {step}: greedy validation accuracy {found.accuracy:.3f}, format {found.format_rate:.3f}")
    return found
