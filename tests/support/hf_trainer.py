"""Tiny Hugging Face models, and a trainer stand-in that hands out their weights and scores with transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.core_model_loading import revert_weight_conversion

from mcore_rl.types import TensorMeta

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def moe_config(width: int = 32) -> Qwen3MoeConfig:
    """Untied head. width: of an expert; the engine pads one that is no multiple of 32."""
    return Qwen3MoeConfig(
        vocab_size=320,
        intermediate_size=96,
        moe_intermediate_size=width,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        **COMMON,
    )


def dense_config() -> Qwen3Config:
    """Tied head, a vocabulary that the engine pads, and square q_proj and o_proj that a transposition leaves well-formed."""
    return Qwen3Config(
        vocab_size=331, intermediate_size=96, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True, **COMMON
    )


def hybrid_config() -> Qwen3NextConfig:
    """Three GatedDeltaNet layers and one of full attention with an output gate; routed and shared experts."""
    sizes = COMMON | {
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    }
    return Qwen3NextConfig(vocab_size=320, intermediate_size=96, norm_topk_prob=True, **sizes)


def build(config: PreTrainedConfig, seed: int, std: float = 0.1) -> PreTrainedModel:
    """A model whose every matrix, router included, is random; norms are moved off 1."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    hybrid = any(name.endswith("A_log") for name, _ in model.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * std if parameter.dim() > 1 else 1 + 0.1 * noise)
            if hybrid and parameter.dim() == 1 and not name.endswith("linear_attn.norm.weight"):
                parameter.sub_(1.0)  # norms scale by 1 + weight, heads remember
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """config.json and safetensors."""
    model.save_pretrained(folder)
    return folder


def hf_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """The checkpoint's own names (one tensor per expert), a tied head left out."""
    tensors = revert_weight_conversion(model, dict(model.state_dict()))
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def hf_logprobs(model: PreTrainedModel, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """Log-prob of every token after the first, by transformers."""
    rows: list[list[float]] = []
    with torch.no_grad():
        for ids in sequences:
            tokens = torch.tensor([list(ids)])
            logprobs = model(tokens, use_cache=False).logits.float().log_softmax(-1)[:, :-1]
            rows.append(logprobs.gather(-1, tokens[:, 1:, None])[0, :, 0].tolist())
    return rows


def hf_best_tokens(model: PreTrainedModel, ids: Sequence[int]) -> list[int]:
    """The most likely next token after every position, by transformers."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0].argmax(-1).tolist()


class HfSource:
    """types.WeightSource over a dict of tensors, all held by one rank."""

    def __init__(self, tensors: dict[str, Tensor], version: int) -> None:
        self.tensors = tensors
        self._version = version

    @property
    def version(self) -> int:
        return self._version

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items())

    def held_names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def bucket(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self.tensors[name]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


def sequences(vocab: int, count: int = 4, length: int = 40) -> list[list[int]]:
    """Fixed token ids of uneven lengths."""
    rows = []
    for row in range(count):
        digest = hashlib.blake2b(str(row).encode()).digest()
        rows.append([(digest[i % 64] * 7 + i * 31 + row) % vocab for i in range(length + row)])
    return rows
