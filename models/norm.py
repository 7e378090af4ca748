"""RMS norm of the local layer spec: Megatron's own torch norm refuses sequence parallelism.

Same arithmetic as transformers' (normalise in fp32, round to the input's dtype, then scale).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, equation 4)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        """weight [hidden_size] of config.params_dtype, marked for Megatron when each rank sees a part of the tokens."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Any shape [..., hidden_size]; same dtype out."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)
