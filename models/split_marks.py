"""Megatron's mark on weights that each tensor-parallel rank holds a different piece of.

Its layers set the mark while they initialise a weight, and ours are built without initialisation. An unmarked weight is
taken for a copy and left out of the gradient norm on every tensor-parallel rank but the first.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    set_tensor_model_parallel_attributes,
)
from torch import nn


def mark_split_weights(chunks: Iterable[nn.Module]) -> None:
    """Mark the weights of all tensor-parallel layers, experts' included: whole experts of different ranks differ too."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | VocabParallelEmbedding):
                _mark(module)


def _mark(module: nn.Module) -> None:
    weight = module.weight
    if isinstance(weight, nn.Parameter) and "tensor_model_parallel" not in vars(weight):
        set_tensor_model_parallel_attributes(weight, True, 1 if isinstance(module, RowParallelLinear) else 0, 1)
