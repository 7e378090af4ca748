"""On-policy distillation: the reverse KL from a teacher, on tokens that the student itself sampled.

Per trained token, over the teacher's K likeliest tokens v and one bucket for all others:
    KL = sum_v p_s(v) (log p_s(v) - log p_t(v)) + s (log s - log t),  s, t = 1 - sum_v p(v) of student and teacher.
The bucket charges the student for mass that it puts where the teacher's list does not reach; with K = V it is empty and
the value is the full reverse KL. A sum over the list alone could be negative, and would reward leaking.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_rl.algorithms.divergence import kl_of_rest, rest_of
from mcore_rl.algorithms.loss_stats import measured
from mcore_rl.algorithms.losses import LossFunction, LossInputs, TokenLoss


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(student || teacher) in nats, [T], from log-probs [T, K] of the same K tokens; the gradient is the student's."""
    listed = (student.exp() * (student - teacher)).sum(-1)
    return listed + kl_of_rest(student.exp().sum(-1), teacher.exp().sum(-1))


def distill_loss(entropy_coef: float = 0.0) -> LossFunction:
    """Reverse KL to the teacher minus entropy_coef x entropy, per trained token. ValueError for a row without a teacher."""

    def loss(inputs: LossInputs) -> TokenLoss:
        if inputs.teacher is None or inputs.student is None:
            raise ValueError("distillation: the batch carries no teacher log-probs")
        trained = inputs.mask.nonzero()[:, 0]
        student = inputs.student[trained]
        divergence = reverse_kl(student, inputs.teacher[trained])
        term = divergence
        if entropy_coef:
            if inputs.entropy is None:
                raise ValueError(f"distill.entropy_coef={entropy_coef}: the loss was given no entropy")
            term = divergence - entropy_coef * inputs.entropy[trained]
        values = torch.zeros_like(inputs.current).index_copy(0, trained, term)
        sums = {
            "tokens": inputs.mask.sum(),
            "teacher_tokens": inputs.mask.sum(),
            "teacher_kl": divergence.detach().double().sum(),
            "outside_k": rest_of(student.detach().exp().sum(-1)).double().sum(),
        }
        return TokenLoss(values, measured(sums, divergence.new_empty(0)))

    return loss
