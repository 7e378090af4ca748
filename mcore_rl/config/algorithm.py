"""The algorithm's fields: independent axes, mixed freely. Presets are rows in configs/algorithm, never code.

Axes: baseline, ratio level, clip, aggregation, selection; beside them the KL term, the rollout correction and the entropy
bonus. What each value means is written where it is computed, in `mcore_rl.algorithms`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Baseline(str, Enum):
    group_mean = "group_mean"
    group_mean_std = "group_mean_std"
    leave_one_out = "leave_one_out"
    median_mad = "median_mad"
    none = "none"


class RatioLevel(str, Enum):
    """token: one ratio a token. sequence: GSPO. sequence_token: GSPO-token, GSPO's ratio with a gradient per token."""

    token = "token"
    sequence = "sequence"
    sequence_token = "sequence_token"


class Clip(str, Enum):
    """two_sided: PPO's (symmetric or higher by its bounds). dual: with a floor for A < 0. cispo, sapo: weights, not cuts."""

    two_sided = "two_sided"
    dual = "dual"
    cispo = "cispo"
    sapo = "sapo"


class Aggregation(str, Enum):
    token_mean = "token_mean"
    seq_mean_token_mean = "seq_mean_token_mean"
    seq_mean_token_sum = "seq_mean_token_sum"
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"


class Overlong(str, Enum):
    """keep: a truncated answer is scored as it is. filter: it leaves baseline and loss. penalty: long answers pay."""

    keep = "keep"
    filter = "filter"
    penalty = "penalty"


class KlPlacement(str, Enum):
    reward = "reward"
    loss = "loss"


class KlEstimator(str, Enum):
    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class Denominator(str, Enum):
    """Whose log-probs at the sampling weights stand under the ratio: the trainer's recomputed ones, or the sampler's own."""

    trainer = "trainer"
    sampler = "sampler"


class TokenCorrection(str, Enum):
    none = "none"
    truncate = "truncate"
    mask = "mask"


class SequenceCorrection(str, Enum):
    """What a response is rejected on: the sum of its tokens' mismatch, or the mean over them."""

    none = "none"
    sum = "sum"
    mean = "mean"


@dataclass
class ClipCovConfig:
    """fraction 0 switches it off. low and high bound the covariance (nats x advantage) of the tokens that may be chosen."""

    fraction: float = 0.0
    low: float = 1.0
    high: float = 5.0


@dataclass
class SelectionConfig:
    """Which groups and answers of a rollout batch are trained on.

    dynamic_sampling: groups of one reward value are replaced by new prompts' groups, in at most max_rounds rounds of
    generation a step. pass_rate_low, pass_rate_high: groups with another share of correct answers are replaced too.
    overlong=penalty: up to overlong_penalty, over the last overlong_buffer (a share) of rollout.max_tokens.
    """

    dynamic_sampling: bool = False
    max_rounds: int = 4
    pass_rate_low: float = 0.0
    pass_rate_high: float = 1.0
    overlong: Overlong = Overlong.keep
    overlong_buffer: float = 0.2
    overlong_penalty: float = 1.0


INITIAL = "initial"
"""The KL reference that is no folder: the weights RL starts from."""


@dataclass
class KlConfig:
    """coef 0 switches it off, and no reference is held. reference: `initial` (the weights RL starts from) or a folder."""

    coef: float = 0.0
    placement: KlPlacement = KlPlacement.reward
    estimator: KlEstimator = KlEstimator.k1
    reference: str = INITIAL


@dataclass
class CorrectionConfig:
    """Correction of the mismatch between the engine that sampled and the trainer, off unless enabled.

    The defaults below are the combination that came closest to a sampler without mismatch. token_cap bounds the weight
    e^delta from above, token_floor from below (mask only). sequence_max_nats bounds the size of a response's mismatch.
    """

    enabled: bool = False
    denominator: Denominator = Denominator.sampler
    token: TokenCorrection = TokenCorrection.truncate
    token_cap: float = 2.0
    token_floor: float = 0.5
    sequence: SequenceCorrection = SequenceCorrection.sum
    sequence_max_nats: float = 0.7


@dataclass
class AlgorithmConfig:
    """aggregation has no default: None is refused. ddof is that of the group's standard deviation.

    allow_wide_sequence_clip and allow_narrow_token_clip lift the refusal of a clip on the other ratio's scale.
    """

    baseline: Baseline = Baseline.group_mean_std
    ddof: int = 1
    ratio_level: RatioLevel = RatioLevel.sequence
    clip: Clip = Clip.two_sided
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = None
    sapo_temperature_positive: float = 1.0
    sapo_temperature_negative: float = 1.05
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    aggregation: Aggregation | None = None
    length_norm_tokens: int | None = None
    allow_wide_sequence_clip: bool = False
    allow_narrow_token_clip: bool = False
    entropy_coef: float = 0.0
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
