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


def token_ratio(log_ratio_T: Tensor) -> Tensor:
    """exp(log-ratio) per token (PPO, arXiv 1707.06347)."""
    return log_ratio_T.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()


def sequence_ratio(log_ratio_T: Tensor, mask_T: Tensor, segment_of_token_T: Tensor, segments: int) -> Tensor:
    """s_i = exp(mean over trained tokens of the log-ratio), [S]; 1 for a segment without one.

    GSPO, arXiv 2507.18071, equation 7: the length-normalised sequence likelihood ratio.
    """
    zeros = torch.zeros(segments, dtype=log_ratio_T.dtype, device=log_ratio_T.device)
    lengths = zeros.index_add(0, segment_of_token_T, mask_T.to(log_ratio_T.dtype)).clamp_min(1.0)
    mean = zeros.index_add(0, segment_of_token_T, log_ratio_T) / lengths
    return mean.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
