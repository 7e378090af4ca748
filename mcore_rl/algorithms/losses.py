"""Loss per token of one packed row. The caller multiplies by the global token weights and sums: nothing is averaged here.

T tokens, S segments of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.clip import RatioStats, clipped_objective, ratio_stats
from mcore_rl.algorithms.ratio import masked_log_ratio, sequence_ratio, token_ratio
from mcore_rl.algorithms.validate import validate_algorithm
from mcore_rl.config.schema import AlgorithmConfig, RatioLevel


@dataclass(frozen=True)
class LossInputs:
    """One packed row as the loss sees it.

    current: log-probs with gradient [T]. old: [T], or None when this forward is its own old.
    mask: bool [T], trained tokens. segment_of_token: int64 [T]. advantages: [S].
    """

    current: Tensor
    old: Tensor | None
    mask: Tensor
    segment_of_token: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """values: [T], exactly 0 where not trained."""

    values: Tensor
    stats: RatioStats


LossFunction = Callable[[LossInputs], TokenLoss]


def sft_loss(inputs: LossInputs) -> TokenLoss:
    """Negative log-likelihood of the trained tokens."""
    return TokenLoss(torch.where(inputs.mask, -inputs.current, 0.0), RatioStats())


def policy_loss(config: AlgorithmConfig) -> LossFunction:
    """The clipped policy loss that `config` describes; refuses what `validate_algorithm` refuses."""
    validate_algorithm(config)

    def loss(inputs: LossInputs) -> TokenLoss:
        if config.ratio_level is RatioLevel.sequence:
            return sequence_policy_loss(inputs, low=config.clip_low, high=config.clip_high)
        return token_policy_loss(inputs, low=config.clip_low, high=config.clip_high)

    return loss


def token_policy_loss(inputs: LossInputs, *, low: float, high: float) -> TokenLoss:
    """Clipped surrogate with one ratio per token; statistics over trained tokens."""
    ratio = token_ratio(masked_log_ratio(inputs.current, inputs.old, inputs.mask))
    advantage = inputs.advantages[inputs.segment_of_token]
    values, clipped = clipped_objective(ratio, advantage, low=low, high=high)
    return TokenLoss(torch.where(inputs.mask, values, 0.0), ratio_stats(ratio, advantage, clipped, inputs.mask))


def sequence_policy_loss(inputs: LossInputs, *, low: float, high: float) -> TokenLoss:
    """GSPO: one length-normalised ratio per sequence, its loss given to each of its trained tokens.

    Statistics are over sequences with a trained token. Under seq_mean_token_mean weights the sum is the mean over
    sequences, and an unclipped token gets the gradient -A s / (L N).
    """
    segments = inputs.advantages.numel()
    log_ratio = masked_log_ratio(inputs.current, inputs.old, inputs.mask)
    ratio = sequence_ratio(log_ratio, inputs.mask, inputs.segment_of_token, segments)
    values, clipped = clipped_objective(ratio, inputs.advantages, low=low, high=high)
    units = torch.zeros(segments, dtype=torch.bool, device=inputs.mask.device)
    units[inputs.segment_of_token[inputs.mask]] = True
    per_token = torch.where(inputs.mask, values[inputs.segment_of_token], 0.0)
    return TokenLoss(per_token, ratio_stats(ratio, inputs.advantages, clipped, units))
