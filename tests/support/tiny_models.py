"""Tiny random Hugging Face checkpoints of every family, made by transformers itself, and its logits on them.

Sizes are asymmetric (nothing that is swapped or transposed fits) and weights large enough to matter. No Megatron.
"""

import json
from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB = 203
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2, "head_dim": 16}
SHARED = {"shared_expert_intermediate_size": 28}
MIXED = {"mlp_only_layers": [2], "norm_topk_prob": False}
HYBRID = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
NO_DENSE = {key: size for key, size in SIZES.items() if key != "intermediate_size"}
VISION = {
    "depth": 2,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "patch_size": 4,
}
CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, object]]] = {
    "qwen3_moe": (Qwen3MoeConfig, SIZES | MOE | {"norm_topk_prob": True}),
    "qwen3_moe_mixed": (Qwen3MoeConfig, SIZES | MOE | MIXED),
    "qwen3": (Qwen3Config, SIZES | {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "llama_tied": (LlamaConfig, SIZES | {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 16}),
    "qwen2": (Qwen2Config, SIZES | {"rms_norm_eps": 1e-5}),
    "qwen3_next": (Qwen3NextConfig, SIZES | MOE | SHARED | HYBRID),
    "qwen3_5": (Qwen3_5TextConfig, SIZES | HYBRID),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, NO_DENSE | MOE | SHARED | HYBRID),
    "qwen3_5_vision": (Qwen3_5Config, {"text_config": SIZES | HYBRID, "vision_config": VISION}),
    "qwen3_5_moe_vision": (Qwen3_5MoeConfig, {"text_config": NO_DENSE | MOE | SHARED | HYBRID, "vision_config": VISION}),
}


def config_of(family: str, **changes: object) -> PreTrainedConfig:
    """A row of CONFIGS: llama_tied has Llama 3's frequencies, qwen2 biases, qwen3_moe_mixed a dense layer among sparse ones.

    qwen3_next and qwen3_5* are hybrid (three GatedDeltaNet layers, then full attention); *_vision wrap the decoder.
    """
    make, options = CONFIGS[family]
    return make(**options | changes)


def tiny_model(family: str, *, seed: int = 0, std: float | None = None, **changes: object) -> PreTrainedModel:
    """Random weights everywhere, norms, biases and the router (which transformers leaves at zero) included.

    std: of the weights; 0.15, and 0.08 for hybrids, which also forget slowly. Their heads are normed by their own size:
    one that wrote a single value turns by 180 degrees where its query and key are nearly orthogonal, and large weights
    or a short memory make such tokens common.
    """
    torch.manual_seed(seed)
    model = _auto(family).from_config(config_of(family, **changes), dtype=torch.float32)
    hybrid = any(name.endswith("linear_attn") for name, _ in model.named_modules())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(std=std or (0.08 if hybrid else 0.15))
            if name.endswith("linear_attn.norm.weight") if hybrid else name.endswith("norm.weight") or "layernorm" in name:
                parameter.add_(1.0)  # norms that scale by their weight alone: in a hybrid only GatedDeltaNet's own
            if name.endswith("A_log"):
                parameter.uniform_(-4.0, 0.0)
    return model.eval()


def _auto(family: str) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    return AutoModelForImageTextToText if family.endswith("_vision") else AutoModelForCausalLM


def write_tiny(folder, family: str, *, dtype: torch.dtype = torch.float32, **changes: object) -> PreTrainedModel:
    """Save a tiny checkpoint, with two companion files a writer must copy; returns the model that transformers loads."""
    tiny_model(family, **changes).to(dtype).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"note": "not a real tokenizer"}), encoding="utf-8")
    (folder / "generation_config.json").write_text('{"temperature": 0.6}', encoding="utf-8")
    return _auto(family).from_pretrained(folder, dtype=dtype).eval()


def reference(folder, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model from the folder. (`.to(bfloat16)` on a model would also round its rotary frequencies.)"""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def stored_tensors(folder) -> dict[str, torch.Tensor]:
    """Every tensor of every safetensors file in the folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def sequences(lengths: list[int], *, seed: int = 1) -> list[torch.Tensor]:
    """Random token ids, one tensor per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def transformers_logits(model: PreTrainedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Logits [T, V] of each sequence on its own, unpadded."""
    return [model(row[None]).logits[0] for row in rows]


@torch.no_grad()
def router_logits(model: PreTrainedModel, rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Per layer the router logits [sum of T, E] of all sequences, in order."""
    outputs = [model(row[None], output_router_logits=True).router_logits for row in rows]
    return [torch.cat(layer) for layer in zip(*outputs, strict=True)]


def narrowest_margin(logits: torch.Tensor, top_k: int) -> float:
    """Smallest gap between the last chosen and the first rejected router probability over all tokens; logits [T, E]."""
    ranked = logits.softmax(-1).topk(top_k + 1, dim=-1).values
    return float((ranked[:, top_k - 1] - ranked[:, top_k]).min())


def nearest_tie(model: PreTrainedModel, rows: Sequence[torch.Tensor]) -> float:
    """The narrowest margin of all layers on these sequences."""
    return min(narrowest_margin(logits, model.config.num_experts_per_tok) for logits in router_logits(model, list(rows)))
