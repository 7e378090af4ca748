"""What an update carries besides its advantages: the KL in the reward, the correction of the sampler, chosen tokens.

Each function takes a TrainBatch with the log-probs it needs and returns one with the term in it, unchanged where the
configuration switches the term off. All of it is computed once on the whole update, so no split can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mcore_rl.algorithms.aggregate import token_weights
from mcore_rl.algorithms.clip_cov import ClipCovInputs, choose_tokens
from mcore_rl.algorithms.correction import correct
from mcore_rl.algorithms.kl import kl_reward
from mcore_rl.config.algorithm import AlgorithmConfig, Denominator, KlPlacement, RatioLevel
from mcore_rl.types import StopRun, TrainBatch


def needs_old(config: AlgorithmConfig) -> bool:
    """Whether the trainer's log-probs at the sampling weights must be known before the update's own forward."""
    in_reward = config.kl.coef > 0.0 and config.kl.placement is KlPlacement.reward
    return in_reward or config.correction.enabled or config.clip_cov.fraction > 0.0


def with_kl_reward(update: TrainBatch, config: AlgorithmConfig) -> TrainBatch:
    """The KL's part of each token's advantage. ValueError when old or reference log-probs are missing."""
    kl = config.kl
    if not kl.coef or kl.placement is not KlPlacement.reward:
        return update
    if update.old_logprobs is None or update.reference_logprobs is None:
        raise ValueError(f"algorithm.kl.coef={kl.coef} in the reward: the update has no old or no reference log-probs")
    shift = tuple(
        kl_reward(old, reference, mask, kl.coef)
        for old, reference, mask in zip(update.old_logprobs, update.reference_logprobs, update.tokens.loss_mask, strict=True)
    )
    return replace(update, advantage_shift=shift)


def with_correction(update: TrainBatch, config: AlgorithmConfig) -> TrainBatch:
    """Factors for the mismatch, and token weights over what is neither dropped nor rejected.

    StopRun when nothing is left: the engines are too far apart to learn from this batch.
    """
    settings = config.correction
    if not settings.enabled:
        return update
    if update.old_logprobs is None or update.sampler_logprobs is None:
        raise ValueError("algorithm.correction.enabled=true: the update has no old or no sampler log-probs")
    sequence_ratio = config.ratio_level is not RatioLevel.token
    masks = update.tokens.loss_mask
    found = correct(update.old_logprobs, update.sampler_logprobs, masks, settings, sequence_ratio=sequence_ratio)
    if not any(bool(keep.any()) for keep in found.keep):
        largest = found.metrics["correction/delta_seq_max_abs_nats"]
        raise StopRun(f"algorithm.correction rejects every response of an update; largest summed mismatch {largest:.3g} nats")
    weights = token_weights(found.keep, config.aggregation, length_norm_tokens=config.length_norm_tokens)
    return replace(
        update,
        token_weights=weights.weights,
        scale=found.scale,
        ratio_from_sampler=settings.denominator is Denominator.sampler,
        facts={**update.facts, **found.metrics},
    )


def with_chosen_tokens(
    update: TrainBatch, current: Sequence[Tensor], config: AlgorithmConfig, *, seed: int, step: int
) -> TrainBatch:
    """Clip-Cov's choice among the tokens that count. current: log-probs at the weights about to be updated."""
    if not config.clip_cov.fraction:
        return update
    masks = tuple(weight > 0.0 for weight in update.token_weights)
    shifts = update.advantage_shift or tuple(torch.zeros(mask.shape) for mask in masks)
    inputs = ClipCovInputs(
        current=current,
        old=update.token_fields().get("old"),
        advantages=[shift + advantage for shift, advantage in zip(shifts, update.advantages, strict=True)],
        masks=masks,
        sample_ids=update.tokens.sample_ids,
        seed=seed,
        step=step,
    )
    choice = choose_tokens(inputs, config)
    scale = choice.keep
    if update.scale is not None:
        scale = tuple(keep * before for keep, before in zip(choice.keep, update.scale, strict=True))
    return replace(update, scale=scale, facts={**update.facts, **choice.metrics})
