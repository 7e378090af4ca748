"""What an answer is worth, and the data gate that decides whether a task can be trained on at all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RewardForm(str, Enum):
    """How the goal F1 in [0, 1] and the auxiliary terms become the reward.

    goal: R = F1, no auxiliary terms. gated_silu: R = F1 + F1 sigmoid(F1) aux. gated_product: R = F1 (1 + aux).
    """

    goal = "goal"
    gated_silu = "gated_silu"
    gated_product = "gated_product"


class PartialCredit(str, Enum):
    """F1 of a well-formed wrong answer: none is 0; token_f1 for answers that are sets of words; box_iou for boxes."""

    none = "none"
    token_f1 = "token_f1"
    box_iou = "box_iou"


@dataclass
class RewardConfig:
    """form, partial_credit, length_cost_per_token: the built-in reward. The format is a gate: without it F1 is 0.

    function: a reward of your own, package.module:name, called in `workers` processes with timeout_s and memory_gib per
    call. A call that times out, crashes or raises drops its sample, counted; the run stops when more than
    max_failed_frac of a batch fail, and at any result that is no finite number.
    """

    form: RewardForm = RewardForm.goal
    partial_credit: PartialCredit = PartialCredit.none
    length_cost_per_token: float = 0.0
    function: str | None = None
    timeout_s: float = 5.0
    workers: int = 2
    memory_gib: float = 4.0
    max_failed_frac: float = 0.25


@dataclass
class DataGateConfig:
    """The pass-rate probe: prompts x samples_per_prompt at the starting weights. A prompt is in the band when the share
    of its samples that are correct lies in [band_low, band_high].

    Set before the run, it kills a launch that cannot learn: fewer than min_mixed_frac of the prompts with both right and
    wrong samples, or fewer than min_band_frac in the band. early_kill_steps: training stops when its first so many steps
    had no mixed group at all (0 is off). append_to: an earlier probe.jsonl whose rows are taken over.
    """

    prompts: int = 64
    samples_per_prompt: int = 8
    prompts_per_request: int = 64
    band_low: float = 0.2
    band_high: float = 0.8
    min_mixed_frac: float = 0.1
    min_band_frac: float = 0.1
    early_kill_steps: int = 0
    append_to: str | None = None
