"""Our WeightSource as vLLM's, so that every transport of vLLM's (nccl, ipc, ...) takes it. For GPUs; needs vllm."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta
from vllm.distributed.weight_transfer.base import WeightSource as VllmWeightSource

from mcore_rl.seams import WeightSource


class VllmSource(VllmWeightSource):
    """Names, dtypes, shapes and order are those of the wrapped source.

    held_names stays vLLM's default (all): iterating our source hands the full tensors to every rank.
    """

    def __init__(self, source: WeightSource) -> None:
        """Wrap `source`."""
        self._source = source

    @property
    def version(self) -> int:
        """Optimizer steps behind these weights: the label to set once an engine has proved them."""
        return self._source.version

    def metadata(self) -> list[ParamMeta]:
        """Every tensor of the whole model in iteration order."""
        return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in self._source.metadata()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass over all full tensors. Collective over the trainer's ranks."""
        return iter(self._source)
