"""The policy's weights as the weight sync wants them: full tensors, Hugging Face names, and the version they are of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from mcore_rl.types import TensorMeta
from models.weights import ModelWeights


class PolicyWeights:
    """`types.WeightSource` over live parameters: tensors and version are those after the last optimizer step."""

    def __init__(self, model: ModelWeights, version: Callable[[], int]) -> None:
        """`version` says how many optimizer steps have been taken."""
        self._model = model
        self._version = version

    @property
    def version(self) -> int:
        """Optimizer steps taken; negative while a supervised warm-up runs."""
        return self._version()

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Every tensor of the whole model in iteration order, identical on every rank."""
        return tuple(TensorMeta(meta.name, meta.dtype, meta.shape) for meta in self._model.metadata())

    def held_names(self) -> frozenset[str]:
        """Names this rank is the one to write."""
        return self._model.held_names()

    def bucket(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of `names` that this rank holds, in that order. Collective."""
        return self._model.bucket(names)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors on every rank, in metadata order. Collective."""
        return iter(self._model)
