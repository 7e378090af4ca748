"""RMS norm of the local layer spec: Megatron's own torch norm refuses sequence parallelism and zero-centred weights.

Same arithmetic as transformers': normalise in fp32, round to the input's dtype, then scale by the weight; a zero-centred
norm scales by 1 + weight in fp32 and rounds last. The stored weight is never shifted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = scale * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, equation 4).

    scale is the weight, or 1 + weight when config.layernorm_zero_centered_gamma says so.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """weight [hidden_size] of config.params_dtype, marked for Megatron when each rank sees a part of the tokens."""
        super().__init__()
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)
        neutral = 0.0 if self.zero_centered else 1.0
        self.weight = nn.Parameter(torch.full((hidden_size,), neutral, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., hidden_size]; same dtype out."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return (normal * (1.0 + self.weight.float())).to(x.dtype)
        return self.weight * normal.to(x.dtype)
