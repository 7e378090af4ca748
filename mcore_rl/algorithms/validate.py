"""Algorithm configurations that are refused, each with the reason and what would be right."""

from __future__ import annotations

from mcore_rl.config.schema import AlgorithmConfig, Baseline, RatioLevel

WIDEST_SEQUENCE_CLIP = 1e-2


def validate_algorithm(config: AlgorithmConfig, *, samples_per_prompt: int | None = None) -> None:
    """Refuse what cannot mean what it says (ValueError naming the key): see the messages."""
    if config.aggregation is None:
        raise ValueError("algorithm.aggregation is not set; it has no default because the choice changes what is learned")
    for name, bound in (("clip_low", config.clip_low), ("clip_high", config.clip_high)):
        if not bound > 0.0:
            raise ValueError(f"algorithm.{name}={bound}: a positive number is needed")
    if config.clip_low >= 1.0:
        raise ValueError(f"algorithm.clip_low={config.clip_low}: a number below 1 is needed")
    widest = max(config.clip_low, config.clip_high)
    sequence = config.ratio_level is RatioLevel.sequence
    if sequence and widest > WIDEST_SEQUENCE_CLIP and not config.allow_wide_sequence_clip:
        raise ValueError(
            f"algorithm.clip_low={config.clip_low}, clip_high={config.clip_high} with ratio_level=sequence: a length-normalised "
            f"ratio hardly leaves 1, so this never clips; use about 3e-4 and 4e-4, or set allow_wide_sequence_clip=true"
        )
    if samples_per_prompt == 1 and config.baseline is not Baseline.none:
        raise ValueError(
            f"train.samples_per_prompt=1 with algorithm.baseline={config.baseline.value}: every advantage would be 0; "
            "use at least 2 samples or baseline=none"
        )
