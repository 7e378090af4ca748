"""Learning rate of an optimizer step, as a plain function of the step number."""

from __future__ import annotations

import math

from mcore_rl.config.schema import LrSchedule, OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0-based): linear warm-up to lr, then constant or cosine to lr x min_lr_ratio.

    A cosine needs `total_steps` > warmup_steps (ValueError); steps past the end keep the final value.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule is LrSchedule.constant:
        return config.lr
    span = total_steps - config.warmup_steps
    if span < 1:
        raise ValueError(f"optimizer.schedule=cosine needs more than warmup_steps={config.warmup_steps} steps, not {total_steps}")
    progress = min(1.0, (step - config.warmup_steps) / span)
    floor = config.min_lr_ratio
    return config.lr * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress)))
