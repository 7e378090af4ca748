"""Read a vLLM model's weights back from what its kernels really compute with, bit for bit.

vLLM's own checksums are empty on CPU: linear weights are packed and the parameter emptied. Here a linear layer is
asked through itself (y = W e_i, exact because every other product is 0), and packed experts are unpacked with the
permutation that the packing routine itself reveals on integer codes. Runs inside vLLM's process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import torch
from torch import Tensor, nn
from vllm._custom_ops import causal_conv1d_weight_pack, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from mcore_rl.rollout.vllm_layout import Layout, Piece
from mcore_rl.sync.digest import Region, content_digest

_CHUNK = 512


@torch.no_grad()
def read_digests(model: nn.Module, layout: Layout, names: Iterable[str]) -> dict[str, list[str]]:
    """Digest of every piece of the named tensors, in the layout's order. KeyError for a name the engine lacks."""
    reader = _Reader(model)
    result: dict[str, list[str]] = {name: [] for name in names}
    # Sorted by engine matrix, which is read once; results go out in the layout's order.
    pieces = [(name, index) for name in result for index in range(len(layout[name].pieces))]
    digests: dict[tuple[str, int], str] = {}
    for name, index in sorted(pieces, key=lambda item: _address(layout[item[0]].pieces[item[1]])):
        piece = layout[name].pieces[index]
        digests[name, index] = content_digest(reader.value(piece), Region(piece.region.dtype))
    for name, index in pieces:
        result[name].append(digests[name, index])
    return result


def _address(piece: Piece) -> tuple[str, str, int]:
    return piece.module, piece.source, -1 if piece.expert is None else piece.expert


@torch.no_grad()
def read_tensor(model: nn.Module, piece: Piece) -> Tensor:
    """The numbers of one piece."""
    return _Reader(model).value(piece)


class _Reader:
    """Keeps the last matrix, because several HF tensors share one engine matrix."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = dict(model.named_modules())
        self._last: tuple[str, str, int] | None = None
        self._matrix: Tensor | None = None

    def value(self, piece: Piece) -> Tensor:
        matrix = self._load(piece)
        if piece.rows is not None:
            matrix = matrix.narrow(0, *piece.rows)
        return matrix

    def _load(self, piece: Piece) -> Tensor:
        module = self._modules[piece.module]
        if piece.source == "param":
            return module.get_parameter(piece.param)
        key = _address(piece)
        if self._matrix is None or self._last != key:
            self._matrix, self._last = _matrix_of(module, piece), key
        return self._matrix


def _matrix_of(module: nn.Module, piece: Piece) -> Tensor:
    if piece.expert is not None:
        return expert_matrix(module, piece.source, piece.expert)
    return linear_matrix(module) if piece.source == "linear" else convolution_weight(module)


def linear_matrix(layer: nn.Module) -> Tensor:
    """[out, in] of a linear layer or LM head, by unit vectors through the layer's own kernel."""
    if not isinstance(layer, LinearBase | ParallelLMHead):
        raise TypeError(f"{type(layer).__name__} is no linear layer")
    weight = layer.get_parameter("weight")
    if "cpu_linear" not in vars(layer):
        return weight
    width = input_width(layer)
    columns: list[Tensor] = []
    for start in range(0, width, _CHUNK):
        count = min(_CHUNK, width - start)
        unit = torch.zeros(count, width, dtype=weight.dtype)
        unit[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(_apply(layer, unit))
    return torch.cat(columns).t().contiguous()


def convolution_weight(layer: nn.Module) -> Tensor:
    """[channels, 1, taps] of a GatedDeltaNet's convolution. Some CPUs keep it packed, in an order that packing reveals."""
    weight = layer.get_parameter("weight")
    plain = vars(layer).get("_cpu_unpacked_conv_weight")
    if plain is None:
        return weight
    order = _permutation(lambda codes: causal_conv1d_weight_pack(codes.view(weight.dtype).view(plain.shape)), plain.numel(), 2)
    flat = weight.flatten()
    return torch.empty_like(flat).index_copy_(0, order, flat).view(plain.shape).unsqueeze(1)


def input_width(layer: LinearBase | ParallelLMHead) -> int:
    """Columns of the matrix on this worker."""
    if isinstance(layer, ParallelLMHead):
        return layer.embedding_dim
    return layer.input_size_per_partition if isinstance(layer, RowParallelLinear) else layer.input_size


def _apply(layer: LinearBase | ParallelLMHead, inputs: Tensor) -> Tensor:
    method = layer.quant_method
    if not isinstance(method, QuantizeMethodBase):
        raise TypeError(f"{type(layer).__name__} has no method to apply")
    return method.apply(layer, inputs)


def expert_matrix(layer: nn.Module, source: str, expert: int) -> Tensor:
    """[rows, columns] of one local expert's w13 (gate rows, then up rows) or w2, unpacked, without the kernel's padding."""
    if not isinstance(layer, RoutedExperts):
        raise TypeError(f"{type(layer).__name__} holds no routed experts")
    packed = layer.get_parameter(f"{source}_weight")[expert]
    kernel = None if layer.quant_method.moe_kernel is None else layer.quant_method.moe_kernel.fused_experts
    if not isinstance(kernel, CPUUnquantizedExperts):
        return packed
    if kernel._use_zentorch:
        raise RuntimeError(f"no read-back for zentorch experts ({layer.layer_name}); unset the zentorch plugin")
    plain = unpack(packed, kernel.isa)
    width = layer.moe_config.intermediate_size_per_partition
    padded = kernel._padded_intermediate_size(layer.moe_config)
    if source == "w2":
        return plain[:, :width]
    return torch.cat([plain[:width], plain[padded : padded + width]])


def unpack(packed: Tensor, isa: str) -> Tensor:
    """Undo vLLM's packing of one expert [N, K]. RuntimeError when the packing is no permutation."""
    word, places = _places(packed.shape[0], packed.shape[1], isa, packed.dtype)
    return packed.flatten().view(word).index_select(0, places).view(packed.dtype).view_as(packed)


@lru_cache(maxsize=64)
def _places(rows: int, columns: int, isa: str, dtype: torch.dtype) -> tuple[torch.dtype, Tensor]:
    """Where each word of a plain matrix lies in the packed one. Numbers of 2 bytes that stay in pairs move as words of 4."""
    order, word = packing_order(rows, columns, isa, dtype), dtype
    if dtype.itemsize == 2 and order.numel() % 2 == 0:
        first, second = order.view(-1, 2).unbind(1)
        if bool((first % 2 == 0).all()) and torch.equal(first + 1, second):
            order, word = first // 2, torch.int32
    return word, torch.empty_like(order).index_copy_(0, order, torch.arange(order.numel())).int()


@lru_cache(maxsize=64)
def packing_order(rows: int, columns: int, isa: str, dtype: torch.dtype) -> Tensor:
    """int64 [rows * columns]: packed position p holds element order[p]. Found by packing integer codes."""
    return _permutation(
        lambda codes: cpu_prepack_moe_weight(codes.view(dtype).view(1, rows, columns), isa), rows * columns, dtype.itemsize
    )


def _permutation(pack: Callable[[Tensor], Tensor], count: int, itemsize: int) -> Tensor:
    """What `pack` does to `count` numbers of 4 or 2 bytes: result position p holds element [p]. RuntimeError if it loses any."""
    codes = torch.arange(count)
    if itemsize == 4:
        order = pack(codes.int()).view(torch.int32).flatten().long()
    else:
        parts = [pack(part.short()).view(torch.int16).flatten().long() & 0xFFFF for part in (codes & 0xFFFF, codes >> 16)]
        order = parts[0] + (parts[1] << 16)
    if not torch.equal(order.sort().values, codes):
        raise RuntimeError(f"vLLM's packing of {count} weights is no permutation: it cannot be read back")
    return order
