"""How far the sampler's recorded log-probs are from the trainer's at the same weights.

delta = old - sampler, in nats, per sampled token (shape suffix T: tokens of one sequence). A KL computed from
recomputed ratios cannot see this gap, so it is logged on its own every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def delta_statistics(old: Sequence[Tensor], sampler: Sequence[Tensor], mask: Sequence[Tensor]) -> dict[str, float]:
    """Mean, mean |.|, 99th percentile of |.| and max |.| of old - sampler over the tokens where `mask` is True.

    All arguments: B tensors [T_b]. Raises ValueError when no token is trained or a value is not finite.
    """
    gaps = [(o.double() - s.double())[m] for o, s, m in zip(old, sampler, mask, strict=True)]
    delta = torch.cat(gaps) if gaps else torch.zeros(0, dtype=torch.float64)
    if delta.numel() == 0:
        raise ValueError("delta: no trained token in the batch, so trainer and sampler cannot be compared")
    bad = int((~torch.isfinite(delta)).sum())
    if bad:
        raise ValueError(f"delta: {bad} of {delta.numel()} trainer-minus-sampler log-probs are not finite")
    size = delta.abs()
    return {
        "delta_mean_nats": float(delta.mean()),
        "delta_mean_abs_nats": float(size.mean()),
        "delta_p99_nats": float(torch.quantile(size, 0.99))
        if size.numel() <= 10_000_000
        else float(size.sort().values[int(size.numel() * 0.99)]),
        "delta_max_abs_nats": float(size.max()),
    }
