"""What can be wrong with rewards, files and the data gate by themselves."""

from __future__ import annotations

import math
import re

from mcore_rl.config.requirement import at_least, drawable, positive, require, shares
from mcore_rl.config.reward import DataGateConfig, PartialCredit, RewardConfig, RewardForm
from mcore_rl.config.schema import BadRows, Overlap, TaskConfig, TaskKind

FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def validate_reward(config: RewardConfig) -> None:
    """ValueError naming key, value and what would be right."""
    cost = config.length_cost_per_token
    require(math.isfinite(cost) and cost >= 0.0, f"reward.length_cost_per_token={cost}", "must not be negative")
    require(
        cost == 0.0 or config.form is not RewardForm.goal,
        f"reward.length_cost_per_token={cost}",
        "reward.form=goal has no auxiliary terms; use reward.form=gated_silu or gated_product",
    )
    require(
        config.function is None or FUNCTION.fullmatch(config.function) is not None,
        f"reward.function={config.function}",
        "an import path like my_package.rewards:my_reward is needed",
    )
    positive([("reward.timeout_s", config.timeout_s), ("reward.memory_gib", config.memory_gib)])
    at_least(1, [("reward.workers", config.workers)])
    shares([("reward.max_failed_frac", config.max_failed_frac)])


def validate_data_gate(config: DataGateConfig) -> None:
    """ValueError naming key, value and what would be right."""
    n, low, high = config.samples_per_prompt, config.band_low, config.band_high
    at_least(1, [("data_gate.prompts", config.prompts), ("data_gate.prompts_per_request", config.prompts_per_request)])
    drawable([("data_gate.prompts", config.prompts)])
    at_least(2, [("data_gate.samples_per_prompt", n)])
    at_least(0, [("data_gate.early_kill_steps", config.early_kill_steps)])
    shares([("data_gate.band_low", low), ("data_gate.band_high", high)])
    shares([("data_gate.min_mixed_frac", config.min_mixed_frac), ("data_gate.min_band_frac", config.min_band_frac)])
    require(
        any(low <= correct / n <= high for correct in range(n + 1)),
        f"data_gate.band_low={low}",
        f"no share of {n} samples lies between it and data_gate.band_high={high}",
    )


def validate_task_fields(config: TaskConfig, reward: RewardConfig) -> None:
    """ValueError naming a key that is not read with this kind of task."""
    of_files = config.kind is TaskKind.file
    for key, value, default in (("bad_rows", config.bad_rows, BadRows.refuse), ("overlap", config.overlap, Overlap.refuse)):
        require(of_files or value is default, f"task.{key}={value.name}", "is read with task.kind=file only")
    require(
        not config.band_any_model or config.band_file is not None,
        "task.band_any_model=true",
        "is read with task.band_file only",
    )
    require(
        config.kind is not TaskKind.countdown or reward.partial_credit is PartialCredit.none,
        f"reward.partial_credit={reward.partial_credit.name}",
        "Countdown's answers are expressions, and no part of one is part of a right one; use none",
    )
