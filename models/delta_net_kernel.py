"""flash-linear-attention's kernels for GatedDeltaNet on a GPU. Plain torch is for the CPU; on a GPU it is never a stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from models.gated_delta_rule import (
    DeltaRuleInputs,
    causal_convolution,
    chunked_gated_delta_rule,
    recurrent_gated_delta_rule,
)

PACKAGE = "flash-linear-attention"


@dataclass(frozen=True)
class DeltaNetKernel:
    """The two functions of the package, as they are there."""

    chunk_gated_delta_rule: Any
    causal_conv1d: Any

    def rule(self, inputs: DeltaRuleInputs, cu_seqlens: Tensor) -> Tensor:
        """As `chunked_gated_delta_rule`: the kernel normalises q and k, scales q and shares key heads among value heads."""
        q, k, v, log_decay, beta = (x[None] for x in inputs)
        out, _ = self.chunk_gated_delta_rule(
            q, k, v, g=log_decay, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens.long()
        )
        return out[0]

    def convolution(self, x: Tensor, weight: Tensor, cu_seqlens: Tensor) -> Tensor:
        """As `causal_convolution`."""
        out, _ = self.causal_conv1d(x[None], weight[:, 0], activation="silu", cu_seqlens=cu_seqlens.long())
        return out[0]


def load_kernel() -> DeltaNetKernel:
    """ValueError naming the package when it is not installed or lacks a function."""
    try:
        rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
        convolution = import_module("fla.modules.causal_conv1d").causal_conv1d
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"GatedDeltaNet on a GPU needs the package {PACKAGE}>=0.6.0 ({error}): pip install '{PACKAGE}[cuda]'"
        ) from error
    return DeltaNetKernel(rule, convolution)


def check_kernel(device: torch.device) -> None:
    """ValueError naming the package when a GPU would lack its kernel; the CPU needs none."""
    if device.type != "cpu":
        load_kernel()


def _step(rule: Any, convolution: Any, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output and gradients of a convolution and the rule over its channels: 2 key heads, 4 value heads of 64."""
    mixed, weight, log_decay, beta = leaves
    q, k, v = convolution(mixed, weight).unflatten(1, (8, 64)).split([2, 2, 4], dim=1)
    out = rule(DeltaRuleInputs(q.contiguous(), k.contiguous(), v.contiguous(), log_decay, beta))
    return out, *torch.autograd.grad(out.float().square().sum(), leaves)


def preflight(device: torch.device, *, tolerance: float = 2e-2) -> float:
    """One real forward and backward over a packed row of 1, 64 and 100 tokens, against the rule token by token in fp32.

    On a GPU the kernels in bfloat16; on the CPU the chunked form. Returns the largest relative difference of the output
    and of any gradient. ValueError without the package, RuntimeError beyond `tolerance`.
    """
    borders = (0, 1, 65, 165)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    mixed, weight = torch.randn(165, 512, generator=generator), torch.randn(512, 1, 4, generator=generator)
    log_decay, beta = -torch.rand(165, 4, generator=generator), torch.rand(165, 4, generator=generator)
    exact = (mixed.to(dtype), weight.to(dtype), log_decay, beta)
    wanted = _step(
        lambda x: recurrent_gated_delta_rule(x, borders),
        lambda x, w: causal_convolution(x, w, borders),
        tuple(t.float().requires_grad_() for t in exact),
    )
    leaves = tuple(t.to(device).requires_grad_() for t in exact)
    if device.type == "cpu":
        found = _step(lambda x: chunked_gated_delta_rule(x, borders), lambda x, w: causal_convolution(x, w, borders), leaves)
    else:
        kernel, cu_seqlens = load_kernel(), torch.tensor(borders, device=device)
        found = _step(lambda x: kernel.rule(x, cu_seqlens), lambda x, w: kernel.convolution(x, w, cu_seqlens), leaves)
    worst = max(_relative(got, want) for got, want in zip(found, wanted, strict=True))
    if not worst <= tolerance:
        raise RuntimeError(f"GatedDeltaNet on {device} is {worst:.3g} away from its reference; at most {tolerance} is right")
    return worst


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got.detach().cpu().float() - want).norm() / want.norm())
