"""Importance ratio current / old, per token or per sequence, over one packed row.

T tokens, S segments (sequences) of the row. Untrained tokens never enter: their values may be anything, NaN included.
Log-ratios are clamped to +-20 before exp, so an outlier is a large finite ratio; NaN passes through and stops the run.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_ABS_LOG_RATIO = 20.0


def masked_log_ratio(current_T: Tensor, old_T: Tensor | None, mask_T: Tensor) -> Tensor:
    """current - old where trained, 0 elsewhere. old None: this forward is its own old, so the ratio is exactly 1."""
    reference = (current_T if old_T is None else old_T).detach()
    return torch.where(mask_T, current_T - reference, 0.0)


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """exp of the clamped log-ratio."""
    return log_ratio.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()


def token_ratio(log_ratio_T: Tensor) -> Tensor:
    """exp(log-ratio) per token (PPO, arXiv 1707.06347)."""
    return clamped_exp(log_ratio_T)


def sequence_ratio(log_ratio_T: Tensor, mask_T: Tensor, segment_of_token_T: Tensor, segments: int) -> Tensor:
    """s_i = exp(mean over trained tokens of the log-ratio), [S]; 1 for a segment without one.

    GSPO, arXiv 2507.18071, equation 7: the length-normalised sequence likelihood ratio.
    """
    zeros = torch.zeros(segments, dtype=log_ratio_T.dtype, device=log_ratio_T.device)
    lengths = zeros.index_add(0, segment_of_token_T, mask_T.to(log_ratio_T.dtype)).clamp_min(1.0)
    return clamped_exp(zeros.index_add(0, segment_of_token_T, log_ratio_T) / lengths)


def sequence_token_ratio(sequence_S: Tensor, log_ratio_T: Tensor, segment_of_token_T: Tensor) -> Tensor:
    """s_it = sg(s_i) x pi_t / sg(pi_t), [T]: the value of s_i, a gradient through the token's own log-prob.

    GSPO-token, arXiv 2507.18071, equation 14. With one advantage a sequence it is GSPO; it takes one per token too.
    """
    own = (log_ratio_T - log_ratio_T.detach()).exp()
    return sequence_S.detach()[segment_of_token_T] * own
