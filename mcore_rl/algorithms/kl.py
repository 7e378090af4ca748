"""KL of the policy from a reference, estimated from sampled tokens, and what each estimator is unbiased for.

With x = log pi(y) - log ref(y) at a token y sampled from pi (at the same prefix), in nats:

            value                      unbiased value of KL(pi||ref)    gradient of its mean when differentiated as a loss
    k1      x                          yes, high variance               0: E[grad log pi] = 0. Refused as a loss.
    k2      x^2 / 2                    no (close when x is small)       exactly that of KL(pi||ref): E[x grad log pi]
    k3      e^-x - 1 + x               yes, low variance, >= 0          that of KL(ref||pi), the other direction

Below x = -20, k3 goes on along its tangent there, so that value and slope stay finite.

k1 as a reward, A_t - coef x_t with x_t constant, has the gradient E[x grad log pi]: k2's as a loss, exactly that of
KL(pi||ref) at every prefix. Unlike a loss term it goes through ratio and clip with the rest of the advantage.
Exact for one position given its prefix: what a token does to the KL of later prefixes is left out everywhere. All of it
holds on-policy; at later updates of a batch the expectation is over the policy that sampled (k1 as a reward carries the
ratio, a loss term does not). Sources: Schulman, "Approximating KL divergence" (2020); Tang & Munos 2025.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.ratio import MAX_ABS_LOG_RATIO
from mcore_rl.config.algorithm import KlEstimator


def kl_values(current: Tensor, reference: Tensor, mask: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimator at every trained token, 0 elsewhere; gradient through `current` only."""
    gap = torch.where(mask, current - reference.detach(), 0.0)
    if estimator is KlEstimator.k1:
        return gap
    if estimator is KlEstimator.k2:
        return 0.5 * gap.square()
    back = -gap
    bounded = back.clamp_max(MAX_ABS_LOG_RATIO)
    beyond = bounded.exp() * (back - bounded)  # exactly 0 within the bound
    return torch.where(mask, torch.expm1(bounded) - back + beyond, 0.0)


def kl_reward(old: Tensor, reference: Tensor, mask: Tensor, coef: float) -> Tensor:
    """What k1 takes from the advantage of every trained token: -coef x (old - reference), a constant.

    It is added after the group's normalisation: a unanimous group's own advantage stays exactly 0, and no group's spread
    is ever measured on KL noise.
    """
    return -coef * kl_values(old.detach(), reference, mask, KlEstimator.k1)
