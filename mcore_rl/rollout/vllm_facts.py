"""What a vLLM worker runs, in plain words and numbers, for the comparison with the trainer. Runs inside vLLM's process."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

from mcore_rl.rollout.match import NO_DRAFT


def engine_facts(model: nn.Module, config: VllmConfig) -> dict[str, Any]:
    """Fact -> value, as this worker's own modules and configuration say; experts and router only where there are some."""
    described = config.model_config
    text: Any = described.hf_text_config
    drafts = config.speculative_config
    facts: dict[str, Any] = {
        "architecture": str(described.architecture),
        "layers": int(text.num_hidden_layers),
        "vocabulary": int(text.vocab_size),
        "precision": _name(described.dtype),
        "max_length": int(described.max_model_len),
        "logprobs": str(described.logprobs_mode),
        "draft": NO_DRAFT if drafts is None else str(drafts.method),
        "model_folder": str(described.model),
    }
    experts = [module for module in model.modules() if isinstance(module, RoutedExperts)]
    return facts | (_expert_facts(model, experts) if experts else {})


def _expert_facts(model: nn.Module, experts: list[RoutedExperts]) -> dict[str, Any]:
    gates = [module for module in model.modules() if isinstance(module, GateLinear)]
    found = {
        "experts": sorted({layer.global_num_experts for layer in experts}),
        "top_k": sorted({layer.top_k for layer in experts}),
        "norm_topk_prob": sorted({bool(layer.renormalize) for layer in experts}),
        "scoring": sorted({_scoring(layer) for layer in experts}),
        "router_dtype": sorted({_name(gate.weight.dtype) for gate in gates}),
        "expert_parallel": sorted({layer.moe_config.ep_size for layer in experts}),
        "expert_placement": sorted({str(layer.expert_placement_strategy) for layer in experts}),
    }
    told = {name: values[0] if len(values) == 1 else values for name, values in found.items() if values}
    return {"moe_layers": len(experts), **told}


def _scoring(layer: RoutedExperts) -> str:
    """The trainer's routers score all experts by softmax and then choose; anything beside that is named."""
    beside = [
        word
        for word, there in (
            ("grouped", layer.use_grouped_topk),
            ("custom", layer.custom_routing_function is not None),
            ("biased", layer.e_score_correction_bias is not None),
            (f"scaled by {layer.routed_scaling_factor}", layer.routed_scaling_factor != 1.0),
        )
        if there
    ]
    return " ".join([layer.scoring_func, *beside])


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
