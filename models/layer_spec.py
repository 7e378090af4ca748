"""The layer specifications that Megatron builds a chunk from: TransformerEngine's, or the local ones with our parts.

Our parts in the local spec: packed attention, an RMS norm that knows sequence parallelism and zero-centred weights; in
both: GatedDeltaNet and the policy's router. Megatron's own are the gate on the attention output and the shared expert
with its gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from models.attention import PackedAttention
from models.gated_delta_net import GatedDeltaNet
from models.norm import RMSNorm
from models.router import PolicyRouter
from models.router_policy import RouterControl
from models.spec import ModelSpec


def resolve_impl(impl: str, device: torch.device) -> str:
    """te or local for `auto|te|local`; auto is te where TransformerEngine is installed on a GPU.

    ValueError for te without a GPU or without TransformerEngine, and for an unknown name.
    """
    if impl not in ("auto", "te", "local"):
        raise ValueError(f"model.impl = {impl!r} is unknown; known: auto, te, local")
    installed = find_spec("transformer_engine") is not None
    if impl == "te" and device.type != "cuda":
        raise ValueError("model.impl = te needs a GPU; use model.impl=local or auto on the CPU")
    if impl == "te" and not installed:
        raise ValueError("model.impl = te needs the package transformer-engine, which is not installed; use model.impl=local")
    if impl == "auto":
        return "te" if installed and device.type == "cuda" else "local"
    return impl


def _submodules(builder: Any) -> Any:
    """Submodules of a ModuleSpec (megatron-core 0.16) or of a functools.partial over a module (0.19)."""
    if isinstance(builder, partial):
        return builder.keywords["submodules"]
    return builder.submodules


def block_spec(
    config: Any, spec: ModelSpec, layers: Sequence[int], *, impl: str, control: RouterControl
) -> TransformerBlockSubmodules:
    """The decoder layers with these 0-based numbers in the whole model, and the final norm."""
    made = [_layer(config, spec, layer, impl=impl, control=control) for layer in layers]
    norm: Any = gpt_layer_specs.TENorm if impl == "te" else RMSNorm
    return TransformerBlockSubmodules(layer_specs=made, layer_norm=norm)


def _layer(config: Any, spec: ModelSpec, number: int, *, impl: str, control: RouterControl) -> ModuleSpec:
    make = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec if impl == "te" else _local_layer
    experts = config.num_moe_experts if spec.has_experts(number) else None
    layer: ModuleSpec = make(
        num_experts=experts,
        moe_grouped_gemm=config.moe_grouped_gemm if experts is not None else False,
        qk_layernorm=config.qk_layernorm,
    )
    parts: Any = layer.submodules
    if experts is not None:
        _submodules(parts.mlp).router = partial(PolicyRouter, control=control)
    if spec.is_linear(number):
        parts.self_attention = ModuleSpec(GatedDeltaNet, params={"delta_net": spec.delta_net})
        parts.input_layernorm = gpt_layer_specs.TENorm if impl == "te" else RMSNorm
    parts.sharded_state_dict_keys_map = _checkpoint_names(spec, number, impl)
    return layer


def _checkpoint_names(spec: ModelSpec, number: int, impl: str) -> dict[str, str]:
    """Norms are stored under the names they have inside TransformerEngine's fused layers: one checkpoint for both."""
    names: dict[str, str] = {}
    if spec.is_linear(number):
        names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
    elif impl == "local":
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if impl == "local" and not spec.has_experts(number):
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names


def _local_layer(**options: Any) -> ModuleSpec:
    layer = gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm", **options)
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = _submodules(parts.self_attention)
    attention.core_attention = PackedAttention
    if options["qk_layernorm"]:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
