"""How far the sampler's recorded log-probs are from the trainer's at the same weights.

delta = old - sampler, in nats, per sampled token; B sequences, T_b tokens of one. A KL computed from recomputed ratios
cannot see this gap, so it is logged on its own every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_ABS_LOG_RATIO = 20.0


def delta_statistics(old: Sequence[Tensor], sampler: Sequence[Tensor], mask: Sequence[Tensor]) -> dict[str, float]:
    """Of old - sampler over the tokens where `mask` is True; all arguments: B tensors [T_b].

    delta_*: mean, mean |.|, 99th percentile of |.| and max |.| per token. delta_seq_*: of the sums over a response, what the
    likelihood ratio of a whole response sees. mismatch_ess_frac: effective sample size of the tokens under the weights
    e^delta, (sum w)^2 / (n sum w^2); mismatch_ess_seq_frac: of the responses under e^(sum of delta), clamped to +-20 nats.
    ValueError when no token is trained or a value is not finite.
    """
    gaps = [(o.double() - s.double())[m] for o, s, m in zip(old, sampler, mask, strict=True)]
    delta = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
    if delta.numel() == 0:
        raise ValueError("delta: no trained token in the batch, so trainer and sampler cannot be compared")
    bad = int((~torch.isfinite(delta)).sum())
    if bad:
        raise ValueError(f"delta: {bad} of {delta.numel()} trainer-minus-sampler log-probs are not finite")
    size, sums = delta.abs(), torch.stack([gap.sum() for gap in gaps if gap.numel()])
    return {
        "delta_mean_nats": float(delta.mean()),
        "delta_mean_abs_nats": float(size.mean()),
        "delta_p99_nats": float(torch.quantile(size, 0.99))
        if size.numel() <= 10_000_000
        else float(size.sort().values[int(size.numel() * 0.99)]),
        "delta_max_abs_nats": float(size.max()),
        "delta_seq_mean_abs_nats": float(sums.abs().mean()),
        "delta_seq_max_abs_nats": float(sums.abs().max()),
        "mismatch_ess_frac": effective_sample_frac(delta),
        "mismatch_ess_seq_frac": effective_sample_frac(sums),
    }


def effective_sample_frac(log_weights: Tensor) -> float:
    """Kish's effective sample size as a share of the samples: (sum w)^2 / (n sum w^2), w = e^log_weight, clamped."""
    weights = log_weights.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
    return float(weights.sum() ** 2 / (weights.numel() * weights.square().sum()))


def outside_clip_frac(
    old: Sequence[Tensor], sampler: Sequence[Tensor], mask: Sequence[Tensor], band: tuple[float, float], *, per_sequence: bool
) -> float:
    """Share of ratios old / sampler outside [1 - low, 1 + high] before any update: what the mismatch alone would clip.

    per_sequence: GSPO's length-normalised ratio, one a response; else one a token. band: (low, high).
    """
    gaps = [(o.double() - s.double())[m] for o, s, m in zip(old, sampler, mask, strict=True)]
    logs = torch.stack([gap.mean() for gap in gaps if gap.numel()]) if per_sequence else torch.cat(gaps)
    ratios = logs.clamp(-MAX_ABS_LOG_RATIO, MAX_ABS_LOG_RATIO).exp()
    return float(((ratios < 1.0 - band[0]) | (ratios > 1.0 + band[1])).double().mean())
