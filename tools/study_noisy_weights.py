"""A sampler that is wrong on purpose: the engine gets the policy's weights times (1 + noise), the trainer keeps its own.

The noise is put where the weights leave the policy, so the sync that delivers them is the real one and proves, bit for bit,
that the engine computes with exactly these noisy weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.seams import Policy, WeightSource
from mcore_rl.types import Pass, TensorMeta, TokenBatch, TokenValues, TrainBatch, UpdateReport


@dataclass(frozen=True)
class Noise:
    """w x (1 + relative_std x e), e standard normal, for tensors of two and more dimensions (router, embeddings, experts).

    e is a function of (seed, tensor name) alone: every rank, sync and variant of a seed meets the same noise, as an engine
    whose kernels are off is off in the same way at every step.
    """

    seed: int
    relative_std: float

    def on(self, name: str, tensor: Tensor) -> Tensor:
        """A new tensor of the same shape and dtype; norms and biases come back as they are."""
        if tensor.dim() < 2:
            return tensor
        key = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.device)
        return (tensor.detach().float() * (1.0 + self.relative_std * drawn)).to(tensor.dtype)


class NoisyWeights:
    """`seams.WeightSource`: names, order, shapes, dtypes, owners and version are those of the source."""

    def __init__(self, source: WeightSource, noise: Noise) -> None:
        self._source = source
        self._noise = noise

    @property
    def version(self) -> int:
        """Optimizer steps behind the clean weights."""
        return self._source.version

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Every tensor of the whole model."""
        return self._source.metadata()

    def held_names(self) -> frozenset[str]:
        """Names this rank is the one to write."""
        return self._source.held_names()

    def bucket(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Noisy full tensors of `names` that this rank holds. Collective."""
        return ((name, self._noise.on(name, tensor)) for name, tensor in self._source.bucket(names))

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All noisy tensors on every rank. Collective."""
        return ((name, self._noise.on(name, tensor)) for name, tensor in self._source)


class NoisyPolicy:
    """`seams.Policy` that computes and learns with clean weights and hands out noisy ones."""

    def __init__(self, clean: Policy, noise: Noise) -> None:
        self._clean = clean
        self._noise = noise

    def logprobs(self, batch: TokenBatch, pass_name: Pass) -> TokenValues:
        """The clean policy's."""
        return self._clean.logprobs(batch, pass_name)

    def update(self, batch: TrainBatch) -> UpdateReport:
        """One optimizer step of the clean policy."""
        return self._clean.update(batch)

    def weights(self) -> NoisyWeights:
        """What the engine shall sample with."""
        return NoisyWeights(self._clean.weights(), self._noise)
