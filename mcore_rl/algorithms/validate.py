"""Algorithm configurations that are refused, each with the reason and what would be right."""

from __future__ import annotations

import math

from mcore_rl.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    Baseline,
    Clip,
    ClipCovConfig,
    CorrectionConfig,
    KlConfig,
    KlEstimator,
    KlPlacement,
    Overlong,
    RatioLevel,
    SelectionConfig,
    SequenceCorrection,
    TokenCorrection,
)
from mcore_rl.config.requirement import require

WIDEST_SEQUENCE_CLIP = 1e-2
WIDEST_MEAN_MISMATCH_NATS = 0.1


def validate_algorithm(config: AlgorithmConfig, *, samples_per_prompt: int | None = None) -> None:
    """Refuse what cannot mean what it says (ValueError naming key and value): see the messages."""
    if config.aggregation is None:
        raise ValueError("algorithm.aggregation is not set; it has no default because the choice changes what is learned")
    _aggregation(config)
    _clip(config)
    _clip_scale(config)
    _clip_cov(config, config.clip_cov)
    _kl(config, config.kl)
    _correction(config.correction)
    _selection(config.selection)
    _require(math.isfinite(config.entropy_coef), "entropy_coef", config.entropy_coef, "a finite number is needed")
    _require(config.ddof in (0, 1), "ddof", config.ddof, "0 (population) or 1 (sample) is needed")
    if samples_per_prompt == 1 and config.baseline is not Baseline.none:
        raise ValueError(
            f"train.samples_per_prompt=1 with algorithm.baseline={config.baseline.value}: every advantage would be 0; "
            "use at least 2 samples or baseline=none"
        )


def _require(ok: bool, key: str, value: object, why: str) -> None:
    require(ok, f"algorithm.{key}={value}", why)


def _aggregation(config: AlgorithmConfig) -> None:
    if config.aggregation is Aggregation.seq_mean_token_sum_norm:
        tokens, why = config.length_norm_tokens, "aggregation=seq_mean_token_sum_norm divides by it: at least 1 is needed"
        _require(tokens is not None and tokens >= 1, "length_norm_tokens", tokens, why)


def _clip(config: AlgorithmConfig) -> None:
    for name, bound in (("clip_low", config.clip_low), ("clip_high", config.clip_high)):
        _require(bound > 0.0 and math.isfinite(bound), name, bound, "a positive number is needed")
    lowest = config.clip_low <= 1.0 if config.clip is Clip.cispo else config.clip_low < 1.0
    _require(lowest, "clip_low", config.clip_low, "a number below 1 is needed (1 is allowed with clip=cispo: no lower bound)")
    if config.clip is Clip.dual:
        found = config.dual_clip
        _require(found is not None and found > 1.0, "dual_clip", found, "clip=dual needs a bound above 1, such as 3")
    else:
        _require(
            config.dual_clip is None, "dual_clip", config.dual_clip, f"is read with clip=dual only; clip={config.clip.value}"
        )
    for name, tau in (("positive", config.sapo_temperature_positive), ("negative", config.sapo_temperature_negative)):
        _require(0.0 < tau < math.inf, f"sapo_temperature_{name}", tau, "a positive number is needed")
    soft = config.clip in (Clip.cispo, Clip.sapo)
    token = config.ratio_level is RatioLevel.token
    _require(token or not soft, "clip", config.clip.value, f"weighs token ratios; ratio_level={config.ratio_level.value}")


def _clip_scale(config: AlgorithmConfig) -> None:
    """A length-normalised ratio moves about a thousandth of a token's: each needs a clip of its own scale."""
    if config.clip is Clip.sapo:
        return
    found, bounds = (config.clip_low, config.clip_high), f"clip_low={config.clip_low}, clip_high={config.clip_high}"
    if config.ratio_level is RatioLevel.token:
        if min(found) < WIDEST_SEQUENCE_CLIP and not config.allow_narrow_token_clip:
            raise ValueError(
                f"algorithm.{bounds} with ratio_level=token: a token's ratio leaves this window after almost any update, so "
                "nearly every token is clipped on that side; use about 0.2 and 0.28, or set allow_narrow_token_clip=true"
            )
    elif max(found) > WIDEST_SEQUENCE_CLIP and not config.allow_wide_sequence_clip:
        raise ValueError(
            f"algorithm.{bounds} with ratio_level={config.ratio_level.value}: a length-normalised ratio hardly leaves 1, so "
            "this never clips; use about 3e-4 and 4e-4, or set allow_wide_sequence_clip=true"
        )


def _clip_cov(config: AlgorithmConfig, found: ClipCovConfig) -> None:
    _require(0.0 <= found.fraction < 1.0, "clip_cov.fraction", found.fraction, "a share of the tokens in [0, 1) is needed")
    _require(found.low < found.high, "clip_cov.low", found.low, f"must be below clip_cov.high={found.high}")
    plain = config.ratio_level is RatioLevel.token and config.clip in (Clip.two_sided, Clip.dual)
    _require(
        plain or not found.fraction,
        "clip_cov.fraction",
        found.fraction,
        f"works on token ratios with a two-sided clip; ratio_level={config.ratio_level.value}, clip={config.clip.value}",
    )


def _kl(config: AlgorithmConfig, kl: KlConfig) -> None:
    _require(kl.coef >= 0.0 and math.isfinite(kl.coef), "kl.coef", kl.coef, "must not be negative")
    if not kl.coef:
        return
    if kl.placement is KlPlacement.loss:
        why = "as a loss its expected gradient is 0; use k2 (gradient of the reverse KL), or placement=reward"
        _require(kl.estimator is not KlEstimator.k1, "kl.estimator", kl.estimator.value, why)
        return
    why = "with placement=reward only k1 gives the gradient of the reverse KL; use k1, or placement=loss"
    _require(kl.estimator is KlEstimator.k1, "kl.estimator", kl.estimator.value, why)
    why = (
        "is per token, and ratio_level=sequence takes one advantage a sequence; use ratio_level=sequence_token or placement=loss"
    )
    _require(config.ratio_level is not RatioLevel.sequence, "kl.placement", kl.placement.value, why)


def _correction(found: CorrectionConfig) -> None:
    if not found.enabled:
        return
    _require(
        found.token_cap >= 1.0, "correction.token_cap", found.token_cap, "a bound of at least 1 is needed: equal engines weigh 1"
    )
    if found.token is TokenCorrection.mask:
        inside = 0.0 <= found.token_floor <= 1.0
        _require(inside, "correction.token_floor", found.token_floor, "a bound in [0, 1] is needed: equal engines weigh 1")
    if found.sequence is SequenceCorrection.none:
        return
    most = found.sequence_max_nats
    _require(most > 0.0 and math.isfinite(most), "correction.sequence_max_nats", most, "a positive number is needed")
    if found.sequence is SequenceCorrection.mean:
        why = f"with sequence=mean, a mean over tokens, this never rejects; use at most {WIDEST_MEAN_MISMATCH_NATS}, such as 1e-2"
        _require(most <= WIDEST_MEAN_MISMATCH_NATS, "correction.sequence_max_nats", most, why)


def _selection(found: SelectionConfig) -> None:
    _require(found.max_rounds >= 1, "selection.max_rounds", found.max_rounds, "must be at least 1")
    ordered = 0.0 <= found.pass_rate_low <= found.pass_rate_high <= 1.0
    _require(
        ordered, "selection.pass_rate_low", found.pass_rate_low, f"must lie in [0, pass_rate_high={found.pass_rate_high} <= 1]"
    )
    if found.overlong is Overlong.penalty:
        share, penalty = found.overlong_buffer, found.overlong_penalty
        _require(0.0 < share < 1.0, "selection.overlong_buffer", share, "a share of rollout.max_tokens in (0, 1) is needed")
        _require(0.0 < penalty < math.inf, "selection.overlong_penalty", penalty, "a positive number is needed")
