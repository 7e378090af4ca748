"""What a decoder is, in numbers: everything that the Megatron configuration and the weight map are made from.

A `ModelSpec` comes from a Hugging Face `config.json` through `models.registry`; it knows no framework.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from parallel.layout import ModelDims

VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class TensorMeta:
    """One Hugging Face tensor of the whole model: name, dtype, full shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's stretched rotary frequencies: long waves slowed by `factor`, short ones kept, a smooth step between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def apply(self, frequencies: Tensor) -> Tensor:
        """Scaled angular frequencies (radians per token), same shape; arXiv 2407.21783, section 3.4.3."""
        wavelength = 2 * math.pi / frequencies
        span = self.high_freq_factor - self.low_freq_factor
        keep = ((self.original_max_positions / wavelength - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / self.factor)


@dataclass(frozen=True)
class Rope:
    """Rotary embedding over the first `fraction` of each head: base `theta`, optionally Llama 3's scaling."""

    theta: float
    scaling: Llama3Scaling | None = None
    fraction: float = 1.0

    def rotated(self, head_dim: int) -> int:
        """How many of a head's dimensions turn."""
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int) -> Tensor:
        """Angular frequencies, fp32 [rotated dimensions / 2], in radians per token."""
        size = self.rotated(head_dim)
        exponent = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
        plain = 1.0 / (self.theta**exponent)
        return plain if self.scaling is None else self.scaling.apply(plain)


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts.

    norm_topk_prob: the chosen experts' probabilities are renormalised to 1, which is a softmax over the chosen logits.
    shared_ffn_size: of the expert that sees every token, scaled by its own sigmoid gate; None without one.
    """

    num_experts: int
    top_k: int
    ffn_size: int
    norm_topk_prob: bool
    shared_ffn_size: int | None = None


@dataclass(frozen=True)
class DeltaNetSpec:
    """Sizes of a GatedDeltaNet layer; each key head serves num_v_heads / num_k_heads value heads.

    conv_width: taps of the causal depthwise convolution over q, k and v.
    """

    num_k_heads: int
    num_v_heads: int
    k_head_dim: int
    v_head_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        """ValueError when the value heads do not divide among the key heads."""
        if self.num_v_heads % self.num_k_heads:
            raise ValueError(
                f"linear_num_value_heads = {self.num_v_heads} is no multiple of linear_num_key_heads = {self.num_k_heads}"
            )

    @property
    def key_size(self) -> int:
        """Channels of q, and of k."""
        return self.num_k_heads * self.k_head_dim

    @property
    def value_size(self) -> int:
        """Channels of v, and of the output gate z."""
        return self.num_v_heads * self.v_head_dim

    @property
    def conv_sections(self) -> tuple[int, int, int]:
        """Channels of the convolution: q, k, v."""
        return self.key_size, self.key_size, self.value_size

    @property
    def projection_sections(self) -> tuple[int, int, int, int, int, int]:
        """Rows of the input projection: q, k, v, z, b (write strength), a (decay)."""
        return self.key_size, self.key_size, self.value_size, self.value_size, self.num_v_heads, self.num_v_heads

    def part(self, size: int) -> DeltaNetSpec:
        """What one of `size` ranks holds; ValueError when the key heads do not divide."""
        if self.num_k_heads % size:
            raise ValueError(f"linear_num_key_heads = {self.num_k_heads} does not divide over {size} ranks")
        return replace(self, num_k_heads=self.num_k_heads // size, num_v_heads=self.num_v_heads // size)


@dataclass(frozen=True)
class ModelSpec:
    """One decoder-only model: sizes, rotary embedding, what is tied, normalised and biased.

    ffn_size is that of a dense layer; with `moe` only `dense_layers` are dense (all numbers 0-based). `linear_layers` are
    GatedDeltaNet's, with the sizes in `delta_net`; the others have softmax attention, with an output gate if attention_gate.
    zero_centered_norms: norms scale by 1 + weight. text_prefix: what the decoder's Hugging Face names start with.
    dtype is the checkpoint's; `other_dtypes` names the tensors that are stored in another one. `carried` names the tensors
    of the checkpoint, as stored, that are no part of the decoder: frozen, and copied through to every export untouched.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    norm_eps: float
    rope: Rope
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    moe: MoeSpec | None = None
    dense_layers: tuple[int, ...] = ()
    delta_net: DeltaNetSpec | None = None
    linear_layers: tuple[int, ...] = ()
    attention_gate: bool = False
    zero_centered_norms: bool = False
    text_prefix: str = "model."
    dtype: torch.dtype = torch.float32
    other_dtypes: tuple[tuple[str, torch.dtype], ...] = ()
    carried: tuple[str, ...] = ()

    def has_experts(self, layer: int) -> bool:
        """True when the layer's feed-forward part is a mixture of experts."""
        return self.moe is not None and layer not in self.dense_layers

    def is_linear(self, layer: int) -> bool:
        """True when the layer mixes tokens with GatedDeltaNet instead of softmax attention."""
        return layer in self.linear_layers

    def dtype_of(self, name: str) -> torch.dtype:
        """Dtype of the Hugging Face tensor `name` in the checkpoint."""
        return self._others.get(name, self.dtype)

    @cached_property
    def _others(self) -> dict[str, torch.dtype]:
        return dict(self.other_dtypes)

    def padded_vocab(self, tp: int) -> int:
        """Vocabulary rows in Megatron: the next multiple of 128 x tp."""
        multiple = VOCAB_MULTIPLE * tp
        return -(-self.vocab_size // multiple) * multiple

    def dims(self) -> ModelDims:
        """The sizes that a parallel layout has to divide."""
        return ModelDims(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            hidden=self.hidden_size,
            ffn=self.ffn_size,
            num_experts=None if self.moe is None else self.moe.num_experts,
            moe_ffn=None if self.moe is None else self.moe.ffn_size,
            vocab_size=self.vocab_size,
            shared_ffn=None if self.moe is None else self.moe.shared_ffn_size,
            linear_heads=None if self.delta_net is None else self.delta_net.num_k_heads,
        )
