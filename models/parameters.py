"""This rank's parameters under their canonical names: numbers of the whole model, names of the local layer spec."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt import GPTModel
from torch import nn

from models.spec import ModelSpec
from parallel.layout import ParallelLayout

_RENAMED = (
    (re.compile(r"self_attention\.linear_qkv\.layer_norm_weight$"), "input_layernorm.weight"),
    (re.compile(r"mlp\.linear_fc1\.layer_norm_weight$"), "pre_mlp_layernorm.weight"),
    (re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)$"), r"mlp.experts.\2.\1.weight"),
    (re.compile(r"mlp\.experts\.local_experts\.(\d+)\."), r"mlp.experts.\1."),
)
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.")


def _canonical(name: str, layer_numbers: Sequence[int], first_expert: int) -> str:
    """TransformerEngine's fused names -> the local spec's; this rank's layer and expert numbers -> the model's."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    name = _LAYER.sub(lambda m: f"decoder.layers.{layer_numbers[int(m[1])]}.", name)
    return _EXPERT.sub(lambda m: f"mlp.experts.{int(m[1]) + first_expert}.", name)


def unwrapped(chunk: nn.Module) -> GPTModel:
    """The GPTModel inside Megatron's wrappers."""
    inner: Any = chunk
    while not isinstance(inner, GPTModel):
        inner = inner.module
    return inner


def canonical_parameters(
    chunks: Sequence[nn.Module], spec: ModelSpec, layout: ParallelLayout, rank: int
) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter, over all chunks of rank `rank`. RuntimeError when two parameters get one name."""
    experts = 0 if spec.moe is None else spec.moe.num_experts // layout.ep * layout.coordinates(rank).ep
    found: dict[str, nn.Parameter] = {}
    for chunk in chunks:
        model = unwrapped(chunk)
        numbers = [int(layer.layer_number) - 1 for layer in model.decoder.layers]  # pyright: ignore[reportArgumentType]
        for name, parameter in model.named_parameters():
            canonical = _canonical(name, numbers, experts)
            if canonical in found:
                raise RuntimeError(f"{name} and another parameter are both {canonical}")
            found[canonical] = parameter
    return found
