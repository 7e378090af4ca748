"""Loss per token of one packed row. The caller multiplies by the global token weights and sums: nothing is averaged here.

T tokens, S segments of the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.clip import objective
from mcore_rl.algorithms.kl import kl_values
from mcore_rl.algorithms.loss_stats import LossStats, measured
from mcore_rl.algorithms.ratio import clamped_exp, masked_log_ratio, sequence_ratio, sequence_token_ratio, token_ratio
from mcore_rl.algorithms.validate import validate_algorithm
from mcore_rl.config.algorithm import AlgorithmConfig, KlEstimator, KlPlacement, RatioLevel


@dataclass(frozen=True)
class LossInputs:
    """One packed row as the loss sees it.

    current: log-probs with gradient [T]. old: [T], or None when this forward is its own old.
    mask: bool [T], trained tokens. segment_of_token: int64 [T]. advantages: [S].
    weights: the token weights [T], for what is logged only. entropy: [T] with gradient. All [T] below may be None:
    scale: constant factor of the policy term (correction, selected tokens). advantage_shift: added to a token's advantage.
    reference: log-probs under the reference. teacher, student: [T, K], log-probs of the teacher's K choices under the
    teacher (constants) and under the current policy (with gradient).
    """

    current: Tensor
    old: Tensor | None
    mask: Tensor
    segment_of_token: Tensor
    advantages: Tensor
    weights: Tensor | None = None
    entropy: Tensor | None = None
    scale: Tensor | None = None
    advantage_shift: Tensor | None = None
    reference: Tensor | None = None
    teacher: Tensor | None = None
    student: Tensor | None = None

    @property
    def segments(self) -> int:
        """S."""
        return self.advantages.numel()

    def token_advantages(self) -> Tensor:
        """[T]: the sequence's advantage, shifted where a shift is given; 0 where not trained."""
        advantage = self.advantages[self.segment_of_token]
        if self.advantage_shift is not None:
            advantage = advantage + self.advantage_shift
        return torch.where(self.mask, advantage, 0.0)


@dataclass(frozen=True)
class TokenLoss:
    """values: [T], exactly 0 where not trained."""

    values: Tensor
    stats: LossStats


@dataclass(frozen=True)
class Surrogate:
    """The policy term: values [T]; the units that the clip acted on, with their ratio, advantage and whether it did."""

    values: Tensor
    ratio: Tensor
    advantage: Tensor
    clipped: Tensor
    units: Tensor


LossFunction = Callable[[LossInputs], TokenLoss]


def sft_loss(inputs: LossInputs) -> TokenLoss:
    """Negative log-likelihood of the trained tokens."""
    return TokenLoss(torch.where(inputs.mask, -inputs.current, 0.0), LossStats())


def policy_loss(config: AlgorithmConfig) -> LossFunction:
    """The loss that `config` describes; refuses what `validate_algorithm` refuses.

    scale x surrogate + kl.coef x KL (placement=loss) - entropy_coef x entropy, per trained token.
    """
    validate_algorithm(config)

    def loss(inputs: LossInputs) -> TokenLoss:
        log_ratio = masked_log_ratio(inputs.current, inputs.old, inputs.mask)
        surrogate = policy_term(inputs, log_ratio, config)
        policy = torch.where(inputs.mask, surrogate.values, 0.0)
        if inputs.scale is not None:
            policy = policy * torch.where(inputs.mask, inputs.scale, 0.0)
        values = policy + _regularisers(inputs, config)
        return TokenLoss(values, _statistics(inputs, log_ratio, surrogate, policy))

    return loss


def policy_term(inputs: LossInputs, log_ratio: Tensor, config: AlgorithmConfig) -> Surrogate:
    """The clipped surrogate at the configured ratio level.

    sequence: GSPO; its loss is given to each of the sequence's trained tokens, so under seq_mean_token_mean weights the
    sum is the mean over sequences, and an unclipped token gets the gradient -A s / (L N).
    """
    segment, advantage = inputs.segment_of_token, inputs.token_advantages()
    logprob = torch.where(inputs.mask, inputs.current, 0.0)
    if config.ratio_level is RatioLevel.token:
        ratio = token_ratio(log_ratio)
        values, clipped = objective(config, ratio, advantage, logprob)
        return Surrogate(values, ratio, advantage, clipped, inputs.mask)
    sequence = sequence_ratio(log_ratio, inputs.mask, segment, inputs.segments)
    if config.ratio_level is RatioLevel.sequence_token:
        ratio = sequence_token_ratio(sequence, log_ratio, segment)
        values, clipped = objective(config, ratio, advantage, logprob)
        return Surrogate(values, ratio, advantage, clipped, inputs.mask)
    values, clipped = objective(config, sequence, inputs.advantages, sequence)
    units = torch.zeros(inputs.segments, dtype=torch.bool, device=inputs.mask.device)
    units[segment[inputs.mask]] = True
    return Surrogate(values[segment], sequence, inputs.advantages, clipped, units)


def _regularisers(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """KL and entropy terms of the loss, [T], 0 where not trained."""
    term = torch.zeros_like(inputs.current)
    if config.kl.coef and config.kl.placement is KlPlacement.loss:
        if inputs.reference is None:
            raise ValueError(f"algorithm.kl.coef={config.kl.coef}: the batch carries no reference log-probs")
        term = config.kl.coef * kl_values(inputs.current, inputs.reference, inputs.mask, config.kl.estimator)
    if config.entropy_coef:
        if inputs.entropy is None:
            raise ValueError(f"algorithm.entropy_coef={config.entropy_coef}: the loss was given no entropy")
        term = term - config.entropy_coef * torch.where(inputs.mask, inputs.entropy, 0.0)
    return term


def _statistics(inputs: LossInputs, log_ratio: Tensor, surrogate: Surrogate, policy: Tensor) -> LossStats:
    """Everything that is logged about this row, from detached values."""
    units, mask, advantage = surrogate.units, inputs.mask, surrogate.advantage
    active, chosen = units & (advantage != 0), surrogate.ratio.detach()[units].double()
    clipped, moved = surrogate.clipped & active, log_ratio.detach()[mask].double()
    sums = {
        "clipped": clipped.sum(),
        "clipped_high": (clipped & (advantage > 0)).sum(),
        "active": active.sum(),
        "count": units.sum(),
        "total": chosen.sum(),
        "tokens": mask.sum(),
        "ratio_kl": (clamped_exp(moved) - 1.0 - moved).sum(),
    }
    if inputs.weights is not None:
        weighted, sign = (policy.detach() * inputs.weights).double(), inputs.token_advantages()
        sums["pg_positive"] = weighted[sign > 0].sum()
        sums["pg_negative"] = weighted[sign < 0].sum()
    if inputs.reference is not None:
        sums["reference_tokens"] = mask.sum()
        for name, kind in (("kl_k1", KlEstimator.k1), ("kl_k3", KlEstimator.k3)):
            sums[name] = kl_values(inputs.current.detach(), inputs.reference, mask, kind).double().sum()
    return measured(sums, chosen)
