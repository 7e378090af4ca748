"""Which Hugging Face tensors a vLLM model is made of, and where each one sits inside it on this worker.

Derived from the engine's own modules and its own name mapper, so it is the engine's statement of what it needs. Runs
inside vLLM's process.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import nn
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from mcore_rl.sync.digest import Region


@dataclass(frozen=True)
class Piece:
    """A region of a Hugging Face tensor and its address in the engine.

    source: `linear`, `conv`, `param`, `w13` or `w2`; param: the parameter's name for `param`. rows: of the engine's matrix
    (None: all). expert: index into the engine's stacked experts.
    """

    region: Region
    module: str
    source: str
    param: str = "weight"
    rows: tuple[int, int] | None = None
    expert: int | None = None


@dataclass
class Entry:
    """One Hugging Face tensor: its full shape and the pieces this worker holds (none: another worker's expert)."""

    shape: tuple[int, ...]
    pieces: list[Piece] = field(default_factory=list)


Layout = dict[str, Entry]
ShardId = str | int | tuple[int, ...]


def describe(model: nn.Module) -> Layout:
    """Every Hugging Face tensor of the model. ValueError naming a module whose tensors have no known HF name."""
    names = HfNames(model)
    layout: Layout = {}
    tied: dict[int, str] = {}
    convolutions: dict[str, QwenGatedDeltaNetAttention] = {}
    for path, module in model.named_modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        if isinstance(module, QwenGatedDeltaNetAttention):
            convolutions[f"{path}.conv1d"] = module
            _add_delta_net(layout, module, path, names.plain(path))
        elif path in convolutions:
            _add_convolution(layout, convolutions[path], path, names.plain(path))
        elif isinstance(module, VocabParallelEmbedding):
            _add_vocab(layout, module, path, tied.setdefault(id(module.weight), f"{names.plain(path)}.weight"))
        elif isinstance(module, RoutedExperts):
            _add_experts(layout, module, path, names.plain(path))
        elif isinstance(module, LinearBase):
            _add_linear(layout, module, path, names)
        else:
            _add_parameters(layout, module, path, names.plain(path))
    return layout


class HfNames:
    """Engine module path -> Hugging Face module path, by inverting the model's own mapper."""

    def __init__(self, model: nn.Module) -> None:
        """Read the mappers: prefixes are the whole model's, fused layers may be known to an inner one only."""
        mapper = getattr(model, "hf_to_vllm_mapper", None)
        inner = [getattr(module, "hf_to_vllm_mapper", None) for module in model.modules()]
        self._stacked = {old: new for found in inner if found for old, new in found.orig_to_new_stacked.items()}
        # `model.language_model.` -> `model.` only accepts a second spelling: the engine's own is a Hugging Face name too.
        prefixes = mapper.orig_to_new_prefix.items() if mapper else ()
        self._prefixes = {new: old for old, new in prefixes if new and not old.startswith(new)}

    def plain(self, path: str) -> str:
        """The path with the engine's own prefixes undone."""
        for new, old in self._prefixes.items():
            if path.startswith(new):
                return old + path.removeprefix(new)
        return path.removesuffix(".routed_experts")

    def shards(self, path: str) -> dict[ShardId, str]:
        """Shard id -> HF path of a layer that fuses several HF tensors. ValueError when the mapper does not know it."""
        found = {shard: path.removesuffix(new) + old for old, (new, shard) in self._stacked.items() if path.endswith(new)}
        if not found:
            raise ValueError(f"engine module {path} fuses several tensors but vLLM's name mapper has no entry for it")
        return {shard: self.plain(name) for shard, name in found.items()}


def _add(layout: Layout, name: str, shape: tuple[int, ...], piece: Piece) -> None:
    entry = layout.setdefault(name, Entry(shape))
    entry.pieces.append(piece)


def _add_vocab(layout: Layout, module: VocabParallelEmbedding, path: str, name: str) -> None:
    shard = module.shard_indices
    length = shard.org_vocab_end_index - shard.org_vocab_start_index
    region = Region(module.get_parameter("weight").dtype, 0, shard.org_vocab_start_index, length)
    source = "linear" if isinstance(module, ParallelLMHead) else "param"
    shape = (module.org_vocab_size, module.embedding_dim)
    _add(layout, name, shape, Piece(region, path, source, rows=(0, length)))


def _add_experts(layout: Layout, module: RoutedExperts, path: str, prefix: str) -> None:
    config = module.moe_config
    width, hidden = config.intermediate_size_per_partition, config.hidden_dim
    tp_rank, tp_size = config.moe_parallel_config.tp_rank, config.moe_parallel_config.tp_size
    dtype = module.get_parameter("w13_weight").dtype
    for expert in range(module.global_num_experts):
        local = module.expert_map_manager.map_global_to_local(expert)
        for projection, source, dim in (
            (module.ckpt_gate_proj_name, "w13", 0),
            (module.ckpt_up_proj_name, "w13", 0),
            (module.ckpt_down_proj_name, "w2", 1),
        ):
            name = f"{prefix}.{expert}.{projection}.weight"
            shape = (width * tp_size, hidden) if dim == 0 else (hidden, width * tp_size)
            entry = layout.setdefault(name, Entry(shape))
            if local >= 0:
                region = Region(dtype, dim, tp_rank * width, width)
                start = width if projection == module.ckpt_up_proj_name else 0
                rows = (start, width) if source == "w13" else None
                entry.pieces.append(Piece(region, path, source, rows=rows, expert=local))


def _add_linear(layout: Layout, module: LinearBase, path: str, names: HfNames) -> None:
    dtype = module.get_parameter("weight").dtype
    for hf_path, full, dim, start, length, row in _linear_parts(module, path, names):
        region = Region(dtype, dim, start, length)
        rows = None if dim == 1 else (row, length)
        shape = (full, module.input_size)
        _add(layout, f"{hf_path}.weight", shape, Piece(region, path, "linear", rows=rows))
        if module._parameters.get("bias") is not None:
            bias = Region(dtype, 0, start, length) if dim == 0 else Region(dtype)
            _add(layout, f"{hf_path}.bias", (full,), Piece(bias, path, "param", param="bias", rows=rows))


def _linear_parts(module: LinearBase, path: str, names: HfNames) -> list[tuple[str, int, int, int, int, int]]:
    """(HF path, full output size, sharded dim, start, length, first engine row) of every HF tensor in the layer."""
    if isinstance(module, QKVParallelLinear):
        return _qkv_parts(module, names.shards(path))
    if isinstance(module, MergedColumnParallelLinear) and len(module.output_sizes) > 1:
        return _merged_parts(module, names.shards(path))
    plain = names.plain(path)
    if isinstance(module, RowParallelLinear):
        length = module.input_size_per_partition
        return [(plain, module.output_size, 1, module.tp_rank * length, length, 0)]
    if isinstance(module, ColumnParallelLinear):
        length = module.output_size_per_partition
        return [(plain, module.output_size, 0, module.tp_rank * length, length, 0)]
    return [(plain, module.output_size, 0, 0, module.output_size, 0)]


def _merged_parts(module: MergedColumnParallelLinear, shards: dict[ShardId, str]) -> list[tuple[str, int, int, int, int, int]]:
    """A Hugging Face tensor may be several outputs of the layer in a row: each is a region of its own."""
    parts: list[tuple[str, int, int, int, int, int]] = []
    for shard, path in shards.items():
        outputs = shard if isinstance(shard, tuple) else (int(shard),)
        full, before = sum(module.output_sizes[output] for output in outputs), 0
        for output in outputs:
            length = module.output_sizes[output] // module.tp_size
            row = sum(module.output_sizes[:output]) // module.tp_size
            parts.append((path, full, 0, before + module.tp_rank * length, length, row))
            before += module.output_sizes[output]
    return parts


def _add_delta_net(layout: Layout, module: QwenGatedDeltaNetAttention, path: str, hf_path: str) -> None:
    """A_log and dt_bias: a rank holds those of its heads."""
    for name, parameter in module.named_parameters(recurse=False):
        count = parameter.shape[0]
        region = Region(parameter.dtype, 0, module.tp_rank * count, count)
        _add(layout, f"{hf_path}.{name}", (count * module.tp_size,), Piece(region, path, "param", param=name))


def _add_convolution(layout: Layout, owner: QwenGatedDeltaNetAttention, path: str, hf_path: str) -> None:
    """[q, k, v channels, 1, taps]: a rank holds its heads' channels of each section."""
    dtype, row, before = owner.conv1d.get_parameter("weight").dtype, 0, 0
    shape = (owner.conv_dim, 1, owner.conv_kernel_size)
    for section in (owner.key_dim, owner.key_dim, owner.value_dim):
        length = section // owner.tp_size
        region = Region(dtype, 0, before + owner.tp_rank * length, length)
        _add(layout, f"{hf_path}.weight", shape, Piece(region, path, "conv", rows=(row, length)))
        row, before = row + length, before + section


def _qkv_parts(module: QKVParallelLinear, shards: dict[ShardId, str]) -> list[tuple[str, int, int, int, int, int]]:
    q, k, v = (
        module.num_heads * module.head_size,
        module.num_kv_heads * module.head_size,
        module.num_kv_heads * module.v_head_size,
    )
    kv_rank = module.tp_rank // module.num_kv_head_replicas
    return [
        (shards["q"], module.total_num_heads * module.head_size, 0, module.tp_rank * q, q, 0),
        (shards["k"], module.total_num_kv_heads * module.head_size, 0, kv_rank * k, k, q),
        (shards["v"], module.total_num_kv_heads * module.v_head_size, 0, kv_rank * v, v, q + k),
    ]


def _add_parameters(layout: Layout, module: nn.Module, path: str, hf_path: str) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        shape = tuple(parameter.shape)
        _add(layout, f"{hf_path}.{name}" if hf_path else name, shape, Piece(Region(parameter.dtype), path, "param", param=name))


def module_elements(layout: Layout) -> dict[str, int]:
    """Engine module -> how many numbers a load must bring it on this worker. A tied head gets none of its own."""
    totals: dict[str, int] = {}
    for entry in layout.values():
        first_owner = {piece.region: piece.module for piece in reversed(entry.pieces)}
        for region, module in first_owner.items():
            size = math.prod(entry.shape)
            share = size if region.dim is None else size // entry.shape[region.dim] * region.length
            totals[module] = totals.get(module, 0) + share
    return totals
