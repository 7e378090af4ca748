"""The reference of a KL term: the policy's own modules with other weights in them, for one forward at a time.

One copy of this rank's weights is held in host memory, and one parameter at a time beside the model's own: no second
model is ever on the device. A separate policy serves as well, since a reference is whoever has `logprobs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from mcore_rl.config.algorithm import INITIAL, KlConfig
from mcore_rl.seams import Policy
from mcore_rl.types import Pass, TokenBatch, TokenValues
from models.spec import ModelSpec
from models.weights import load_hf_weights
from parallel.groups import ProcessGroups


class HeldWeights:
    """A copy of this rank's parameters in host memory that can change places with them, bit for bit."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Copy the parameters as they are now."""
        self._live = [parameter for chunk in chunks for parameter in chunk.parameters()]
        self._held = [parameter.detach().to("cpu", copy=True) for parameter in self._live]

    @torch.no_grad()
    def exchange(self) -> None:
        """What is held goes into the modules, what was in them is held."""
        for live, held in zip(self._live, self._held, strict=True):
            before = live.detach().clone()
            live.copy_(held)
            held.copy_(before)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The modules compute with the held weights inside, and with their own again afterwards, whatever happens."""
        self.exchange()
        try:
            yield
        finally:
            self.exchange()


class ReferencePolicy:
    """Log-probs of the policy's modules under the held weights."""

    def __init__(self, policy: Policy, held: HeldWeights) -> None:
        """`held` must hold parameters of the policy's own modules."""
        self._policy = policy
        self._held = held

    def logprobs(self, batch: TokenBatch, pass_name: Pass) -> TokenValues:
        """As `Policy.logprobs`, at the reference's weights. Collective."""
        with self._held.in_place():
            return self._policy.logprobs(batch, pass_name)


def held_reference(chunks: Sequence[nn.Module], spec: ModelSpec, groups: ProcessGroups, config: KlConfig) -> HeldWeights:
    """The weights that `algorithm.kl.reference` names: those in the modules now, or a Hugging Face folder's.

    ValueError when the folder does not hold a model of this very shape. The modules keep their weights. Collective.
    """
    held = HeldWeights(chunks)
    if config.reference == INITIAL:
        return held
    load_hf_weights(chunks, spec, groups, Path(config.reference))
    held.exchange()
    return held
