"""The training loop: prompt, roll out, score, advantage, loss, update, sync.

Synchronous and on-policy at the first update of every batch. Deliberately absent: asynchronous and partial rollout
(a second loop file when they come, never flags in this one).
"""

from __future__ import annotations

from mcore_rl.run import Run
from mcore_rl.stages import advantages, draw_prompts, fill_up, record, roll_out, score, sync, update
from mcore_rl.step_metrics import StepOutcome


def train(run: Run) -> None:
    """Train `run.policy` for `config.train.steps` rollout batches; collective over the trainer's ranks.

    Starts with a sync, so the engine samples with exactly the trainer's weights; the probe's floor is what trainer and
    engine differ by there, where a warm-up may have moved it. Every step ends with a sync that must return the policy's
    version. Raises StaleRollout, WeightMismatch, EngineDied or StopRun; nothing is skipped.
    """
    run.weight_sync.measure_floor()
    sync(run)
    for step in range(run.config.train.steps):
        prompts = draw_prompts(run, step)
        completions = roll_out(run, prompts, step)
        scores = score(run, prompts, completions)
        prompts, completions, scores = fill_up(run, step, prompts, completions, scores)
        planned = advantages(run, prompts, completions, scores, step)
        reports = update(run, planned)
        synced = sync(run)
        record(run, step, StepOutcome(prompts, completions, scores, planned.rollout, planned.updates, reports, synced))
