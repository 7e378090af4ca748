"""How the ratio is kept from running away: a cut of the objective, or a weight that never cuts.

Every function is elementwise over units (tokens or sequences) and returns the loss to minimise and whether the bound acted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.config.algorithm import AlgorithmConfig, Clip


def clipped_objective(ratio: Tensor, advantage: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Loss -min(r A, clip(r, 1-low, 1+high) A) and whether the clip cut it (bool).

    PPO, arXiv 1707.06347, equation 7, with separate bounds as in DAPO, arXiv 2503.14476.
    """
    free = ratio * advantage
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantage
    return -torch.minimum(free, bounded), (free > bounded).detach()


def dual_clipped_objective(ratio: Tensor, advantage: Tensor, *, low: float, high: float, floor: float) -> tuple[Tensor, Tensor]:
    """As `clipped_objective`, with the loss of A < 0 bounded by -floor x A, so that one huge ratio cannot rule the update.

    Dual-clip PPO, arXiv 1912.09729; floor > 1. A > 0 is untouched.
    """
    loss, cut = clipped_objective(ratio, advantage, low=low, high=high)
    bound = -floor * advantage
    beyond = (advantage < 0) & (loss > bound)
    return torch.where(beyond, bound, loss), cut | beyond.detach()


def cispo_objective(ratio: Tensor, advantage: Tensor, logprob: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Loss -sg(clip(r, 1-low, 1+high)) A log pi: the weight is truncated, the gradient of no token is cut off.

    CISPO, arXiv 2506.13585; low = 1 leaves the lower side free. Its value is no surrogate objective.
    """
    weight = ratio.detach().clamp(1.0 - low, 1.0 + high)
    return -weight * advantage * logprob, weight != ratio.detach()


def sapo_objective(ratio: Tensor, advantage: Tensor, *, positive: float, negative: float) -> tuple[Tensor, Tensor]:
    """Loss -f(r) A with f(r) = 4/tau sigmoid(tau (r - 1)), tau by the sign of A: gradient A at r = 1, fading on both sides.

    SAPO, arXiv 2511.20347. Nothing is ever cut.
    """
    tau = torch.full_like(ratio, negative).masked_fill_(advantage > 0, positive)
    return -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantage, torch.zeros_like(ratio, dtype=torch.bool)


def objective(config: AlgorithmConfig, ratio: Tensor, advantage: Tensor, logprob: Tensor) -> tuple[Tensor, Tensor]:
    """The loss that `config.clip` makes of the ratio; logprob is read by cispo only."""
    low, high = config.clip_low, config.clip_high
    if config.clip is Clip.two_sided:
        return clipped_objective(ratio, advantage, low=low, high=high)
    if config.clip is Clip.cispo:
        return cispo_objective(ratio, advantage, logprob, low=low, high=high)
    if config.clip is Clip.sapo:
        return sapo_objective(
            ratio, advantage, positive=config.sapo_temperature_positive, negative=config.sapo_temperature_negative
        )
    if config.dual_clip is None:
        raise ValueError("algorithm.dual_clip is not set; clip=dual needs a bound above 1, such as 3")
    return dual_clipped_objective(ratio, advantage, low=low, high=high, floor=config.dual_clip)
