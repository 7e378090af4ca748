"""Checkpoints made from a configuration and the weight map alone: no transformers, no Megatron, milliseconds.

Every number in a tensor is its own (unique fill), so that a row in the wrong place is a wrong number and not a small error.
"""

import json

import torch
from safetensors.torch import save_file

from models.hf_io import INDEX
from models.registry import spec_from_config, weight_map

BASE = {
    "hidden_act": "silu",
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 203,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": True}
HYBRID = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 8,
}
CONFIGS = {
    "llama_tied": BASE | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "rope_theta": 5000.0},
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"]},
    "qwen3_moe": BASE | MOE | {"architectures": ["Qwen3MoeForCausalLM"]},
    "qwen3_moe_mixed": BASE | MOE | {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [1]},
    "qwen3_next": BASE | MOE | HYBRID | {"architectures": ["Qwen3NextForCausalLM"]},
    "qwen3_5": BASE | HYBRID | {"architectures": ["Qwen3_5ForCausalLM"]},
    "qwen3_5_moe": BASE | MOE | HYBRID | {"architectures": ["Qwen3_5MoeForCausalLM"]},
    "qwen3_5_vision": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "text_config": BASE | MOE | HYBRID | {"mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
    },
}


def unique(shape, dtype, start):
    """Consecutive numbers, as integers of the dtype's width: every bit pattern differs and all are finite."""
    count = torch.Size(shape).numel()
    if dtype is torch.float32:
        return (torch.arange(count, dtype=torch.float32) + start).reshape(shape)
    return ((torch.arange(count) + start) % 0x7F00).to(torch.int16).view(dtype).reshape(shape)


def tensors_of(config, dtype=torch.float32):
    """Every decoder tensor of the configuration; A_log and dt_bias are fp32."""
    tensors, start = {}, 1
    for rule in weight_map(spec_from_config(config)):
        for meta in rule.tensors:
            if rule.exported:
                tensors[meta.name] = unique(meta.shape, torch.float32 if rule.float32 else dtype, start)
                start += tensors[meta.name].numel()
    return tensors


def mtp_tensors(config, prefix="mtp."):
    """One MTP layer, named and shaped like the last decoder layer, and the tensors around it."""
    text = config.get("text_config", config)
    last = f".layers.{text['num_hidden_layers'] - 1}."
    found = {name.partition(last)[2]: t for name, t in tensors_of(config, torch.bfloat16).items() if last in name}
    around = {f"{prefix}{name}.weight": torch.ones(12) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    around[f"{prefix}fc.weight"] = torch.ones(12, 24)
    return {f"{prefix}layers.0.{name}": t.clone() for name, t in found.items()} | around


def fuse(tensors):
    """The same tensors with every layer's experts fused into 3-D ones."""
    fused, groups = {}, {}
    for name, tensor in tensors.items():
        prefix, found, rest = name.partition(".experts.")
        if found:
            expert, part, _ = rest.split(".")
            groups.setdefault(prefix, {})[int(expert), part] = tensor
        else:
            fused[name] = tensor
    for prefix, parts in groups.items():
        experts = range(1 + max(expert for expert, _ in parts))
        rows = [torch.cat([parts[e, "gate_proj"], parts[e, "up_proj"]]) for e in experts]
        fused[f"{prefix}.experts.gate_up_proj"] = torch.stack(rows)
        fused[f"{prefix}.experts.down_proj"] = torch.stack([parts[e, "down_proj"] for e in experts])
    return fused


def write(folder, config, tensors, *, shards=1):
    """Write the folder; with shards > 1 as an indexed checkpoint whose files cut right through the layers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer.json").write_text('{"note": "not a real tokenizer"}', encoding="utf-8")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    where = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        here = names[number::shards]
        save_file({name: tensors[name] for name in here}, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(here, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder
