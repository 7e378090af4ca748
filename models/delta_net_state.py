"""A GatedDeltaNet layer in a distributed checkpoint: sections apart, so that a checkpoint of one tp size loads at another.

The keys are those of Megatron's own layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from models.checkpoint_layout import CONV_SECTIONS, PROJECTION_SECTIONS


def _by_section(whole: ShardedTensor, data: Tensor, names: Sequence[str], sections: Sequence[int]) -> ShardedTensorFactory:
    """This rank's shard, `sections` rows of each section, as one sharded tensor per section."""
    blank = whole.without_data()

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        if flattened_range is not None:
            raise ValueError(f"{key}: flattened shards are not supported in checkpoints of GatedDeltaNet")
        shard = replace(blank, key=key, data=data, dtype=data.dtype, replica_id=replica_id)
        parts: dict[str, Any] = {}
        start = 0
        for name, rows in zip(names, sections, strict=True):
            (part,) = shard.narrow(0, start, rows)
            parts[name] = replace(part, key=f"{key}.{name}")
            start += rows
        return parts

    return ShardedTensorFactory(whole.key, data, build, _join, whole.replica_id)


@torch.no_grad()
def _join(parts: dict[str, Any]) -> Tensor:
    return torch.cat(list(parts.values()))


def delta_net_state(layer: Any, prefix: str, sharded_offsets: Any, metadata: Any) -> dict[str, Any]:
    """What `GatedDeltaNet.sharded_state_dict` returns: names of the layer's parameters to sharded tensors."""
    metadata = ensure_metadata_has_dp_cp_group(metadata)
    split = {"A_log": layer.A_log, "dt_bias": layer.dt_bias, "conv1d.weight": layer.conv1d.weight}
    state = make_sharded_tensors_for_checkpoint(
        split, prefix, dict.fromkeys(split, 0), sharded_offsets, tp_group=layer.tp_group, dp_cp_group=metadata["dp_cp_group"]
    )
    for name in ("in_proj", "out_norm", "out_proj"):
        child = layer.get_submodule(name)
        state |= sharded_state_dict_default(child, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=layer.tp_group)
    for name, names, sections in (
        ("in_proj.weight", PROJECTION_SECTIONS, layer.sizes.projection_sections),
        ("conv1d.weight", CONV_SECTIONS, layer.sizes.conv_sections),
    ):
        state[prefix + name] = _by_section(state[prefix + name], layer.get_parameter(name), names, sections)
    return state
