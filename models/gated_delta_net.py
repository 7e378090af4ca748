"""GatedDeltaNet as Megatron's self attention: packed rows, tensor, sequence and context parallelism, activation recomputation.

One input projection to q, k, v, an output gate z and two numbers per value head, b (write strength) and a (decay); a short
causal convolution over q, k and v; the gated delta rule; an RMS norm per head, gated by z; one output projection
(arXiv 2412.06464; the layer of Qwen3-Next and Qwen3.5). Parameters are named as Megatron's own layer names them.

Tensor parallel ranks own heads. Under context parallelism a rank has a part of the tokens, and the state needs all of
them: when a rank's key heads divide over the cp ranks, tokens are exchanged for heads and no work is done twice; when they
do not, every cp rank gathers the whole row and computes all of it (cp times the work and memory of this layer).

A_log and dt_bias are fp32 whatever the model's dtype is: exp(A_log) decides how fast a state decays over thousands of
tokens, and bfloat16 is 0.6 % off there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from models.delta_net_kernel import load_kernel
from models.delta_net_state import delta_net_state
from models.gated_delta_rule import DeltaRuleInputs, causal_convolution, chunked_gated_delta_rule
from models.mapping import shard_sections
from models.spec import DeltaNetSpec
from parallel.context import gather_sequence, shard_sequence
from parallel.head_exchange import heads_to_tokens, tokens_to_heads

FLOAT32_PARAMETERS = ("A_log", "dt_bias")


class ShortConvolution(nn.Module):
    """Holds weight [q, k, v channels of this rank, 1, taps], a kernel per channel."""

    def __init__(self, channels: int, width: int, *, dtype: torch.dtype, device: torch.device | None) -> None:
        """Uniform within 1 / sqrt(taps), as torch initialises a convolution."""
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width, dtype=dtype, device=device).uniform_(-1, 1) / width**0.5)


class GatedNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) * silu(gate) over a head's channels, in fp32."""

    def __init__(self, channels: int, *, eps: float, dtype: torch.dtype, device: torch.device | None) -> None:
        """weight [channels], the same for every head of every rank."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor, group: ProcessGroup) -> Tensor:
        """[..., heads, channels] of this rank's heads; same dtype out. Every rank's heads count in the weight's gradient."""
        wide = x.float()
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        weight = copy_to_tensor_model_parallel_region(self.weight.float(), group=group)
        return (weight * normal * functional.silu(gate.float())).to(x.dtype)


class _Heads(NamedTuple):
    """The heads that a rank computes, and their parameters: convolution [C, 1, W], A_log and dt_bias [value heads]."""

    sizes: DeltaNetSpec
    convolution: Tensor
    a_log: Tensor
    dt_bias: Tensor


class GatedDeltaNet(MegatronModule):
    """The layer; give `delta_net` through functools.partial or a ModuleSpec's params.

    ValueError at construction when the heads do not divide over the tensor-parallel ranks, or on a GPU without
    flash-linear-attention.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        *,
        delta_net: DeltaNetSpec,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        """Submodules, mask type and what else Megatron gives to an attention do not matter here."""
        super().__init__(config)
        self.layer_number = layer_number
        self.tp_group: ProcessGroup = pg_collection.tp
        self.cp_group: ProcessGroup = pg_collection.cp
        self.sizes = delta_net.part(self.tp_group.size())
        self.kernel = None if config.use_cpu_initialization else load_kernel()
        device = None if config.use_cpu_initialization else torch.device("cuda", torch.cuda.current_device())
        common: dict[str, Any] = {"config": config, "bias": False, "tp_group": self.tp_group}
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(delta_net.projection_sections),
            init_method=config.init_method,
            gather_output=False,
            **common,
        )
        self._make_head_parameters(device)
        self.out_proj = RowParallelLinear(
            delta_net.value_size,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **common,
        )

    def _make_head_parameters(self, device: torch.device | None) -> None:
        heads, dtype = self.sizes.num_v_heads, self.config.params_dtype
        self.conv1d = ShortConvolution(sum(self.sizes.conv_sections), self.sizes.conv_width, dtype=dtype, device=device)
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=torch.float32, device=device))
        # Drawn in fp32 and away from 0: the logarithm is finite.
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32, device=device).uniform_(0.01, 16.0).log_())
        self.out_norm = GatedNorm(self.sizes.v_head_dim, eps=self.config.layernorm_epsilon, dtype=dtype, device=device)
        for split in (self.conv1d.weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(split, True, 0, 1)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """What moves or casts the module; casts do not reach the fp32 parameters."""
        before = {name: parameter.data for name, parameter in self._float32_parameters()}
        super()._apply(fn, recurse)
        for name, parameter in self._float32_parameters():
            if parameter.dtype is not torch.float32:
                parameter.data = before[name].to(parameter.device)
        return self

    def _float32_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.named_parameters(recurse=False) if name in FLOAT32_PARAMETERS)

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[t, 1, H] -> [t, 1, H], t this rank's tokens; ValueError unless packed_seq_params says thd."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("GatedDeltaNet needs packed sequences: call the model through models.build.forward_packed")
        if self.kernel is None and hidden_states.device.type != "cpu":
            raise ValueError(f"GatedDeltaNet was built for the CPU and is called on {hidden_states.device}: build it there")
        projected, _ = self.in_proj(hidden_states)
        mixed = self._mix(projected[:, 0], packed_seq_params.cu_seqlens_q)
        output, _ = self.out_proj(mixed[:, None])
        return output, None

    def _mix(self, projected: Tensor, cu_seqlens: Tensor) -> Tensor:
        """[t / cp, projection] -> [t / cp, value channels], with all tokens of the row in between."""
        size, rank = self.cp_group.size(), self.cp_group.rank()
        if size == 1:
            return self._mix_row(projected, cu_seqlens, self._heads(0, 1))
        if self.sizes.num_k_heads % size:
            row = gather_sequence(projected, cu_seqlens, self.cp_group)
            return shard_sequence(self._mix_row(row, cu_seqlens, self._heads(0, 1)), cu_seqlens, self.cp_group)
        sections = projected.split(self.sizes.projection_sections, dim=1)
        by_rank = torch.cat([section.unflatten(1, (size, -1)) for section in sections], dim=-1)
        row = tokens_to_heads(by_rank, cu_seqlens, self.cp_group)
        mixed = self._mix_row(row, cu_seqlens, self._heads(rank, size))
        return heads_to_tokens(mixed, cu_seqlens, self.cp_group).flatten(1)

    def _heads(self, rank: int, size: int) -> _Heads:
        """The rank-th of `size` parts of this tensor-parallel rank's heads."""
        if size == 1:
            return _Heads(self.sizes, self.conv1d.weight, self.A_log, self.dt_bias)
        convolution = shard_sections(self.conv1d.weight, self.sizes.conv_sections, rank, size)
        return _Heads(self.sizes.part(size), convolution, self.A_log.chunk(size)[rank], self.dt_bias.chunk(size)[rank])

    def _mix_row(self, projected: Tensor, cu_seqlens: Tensor, heads: _Heads) -> Tensor:
        """[T, projection] of a whole row and some heads -> [T, value channels]."""
        sizes = heads.sizes
        qkv, z, b, a = projected.split([sum(sizes.conv_sections), sizes.value_size, sizes.num_v_heads, sizes.num_v_heads], dim=1)
        # Lists are made on the CPU only: on a GPU they would wait for the device.
        borders = tuple(cu_seqlens.tolist()) if self.kernel is None else ()
        if self.kernel is None:
            qkv = causal_convolution(qkv, heads.convolution, borders)
        else:
            qkv = self.kernel.convolution(qkv, heads.convolution, cu_seqlens)
        q, k, v = qkv.split(sizes.conv_sections, dim=1)
        inputs = DeltaRuleInputs(
            q.unflatten(1, (-1, sizes.k_head_dim)),
            k.unflatten(1, (-1, sizes.k_head_dim)),
            v.unflatten(1, (-1, sizes.v_head_dim)),
            -heads.a_log.exp() * functional.softplus(a.float() + heads.dt_bias),
            b.float().sigmoid(),
        )
        out = chunked_gated_delta_rule(inputs, borders) if self.kernel is None else self.kernel.rule(inputs, cu_seqlens)
        return self.out_norm(out, z.unflatten(1, (-1, sizes.v_head_dim)), self.tp_group).flatten(1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For distributed checkpoints: every section of every split parameter on its own, so that any tp size can load it."""
        return delta_net_state(self, prefix, sharded_offsets, metadata)
