"""The seams (Protocols) between the parts of a run: whoever has these methods fits, no base class needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from mcore_rl.types import (
    Completion,
    Pass,
    Prompt,
    SamplingParams,
    Score,
    TensorMeta,
    TokenBatch,
    TokenValues,
    TrainBatch,
    UpdateReport,
)


class WeightSource(Protocol):
    """The policy's weights under their Hugging Face names, always those after the last optimizer step."""

    @property
    def version(self) -> int:
        """Optimizer steps taken; negative while the supervised warm-up runs."""
        ...

    def metadata(self) -> tuple[TensorMeta, ...]:
        """Every tensor of the whole model in iteration order, identical on every rank."""
        ...

    def held_names(self) -> frozenset[str]:
        """Names this rank is the one to write: each name is held by exactly one rank of the trainer."""
        ...

    def bucket(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Full tensors of `names` that this rank holds, contiguous, in that order.

        Collective: every trainer rank calls it with the same names (tensor-parallel shards are gathered inside).
        """
        ...

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of the whole model on every rank, in metadata order. Collective."""
        ...


class Answerer(Protocol):
    """Whatever answers prompts: a rollout engine, a teacher."""

    @property
    def name(self) -> str:
        """For messages: placement, index, address."""
        ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[Completion]:
        """samples_per_prompt completions per prompt, ordered by (prompt, sample)."""
        ...


class RolloutEngine(Answerer, Protocol):
    """One policy copy that samples. Only rank 0 of the trainer talks to it."""

    @property
    def version(self) -> int | None:
        """Version of the weights really loaded and proved; None before the first proved sync or after a failed one."""
        ...

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-prob (nats) of each token after the first given its predecessors, at temperature 1."""
        ...

    def awake(self) -> AbstractContextManager[None]:
        """Engine usable inside; a no-op unless it shares the trainer's GPUs."""
        ...

    def health(self) -> None:
        """Raise EngineDied if it does not answer."""
        ...

    def close(self) -> None:
        """Stop what the run owns; leave no process behind."""
        ...


class Policy(Protocol):
    """The trained model. Three methods; every call is collective over the trainer's ranks."""

    def logprobs(self, batch: TokenBatch, pass_name: Pass) -> TokenValues:
        """Log-prob and entropy of every trained token, whole batch on every rank, no gradient."""
        ...

    def update(self, batch: TrainBatch) -> UpdateReport:
        """One optimizer step on the batch."""
        ...

    def weights(self) -> WeightSource:
        """The weights after the last step."""
        ...


class Reference(Protocol):
    """The policy that a KL term measures from. Any Policy is one."""

    def logprobs(self, batch: TokenBatch, pass_name: Pass) -> TokenValues:
        """As Policy.logprobs, at the reference's weights."""
        ...


class Task(Protocol):
    """Where prompts come from and what an answer is worth."""

    def prompts(self, step: int, count: int) -> list[Prompt]:
        """`count` training prompts of rollout batch `step`, a function of (seed, step) alone."""
        ...

    def eval_prompts(self, split: str, count: int) -> list[Prompt]:
        """`count` distinct prompts of `val` or `test`, disjoint from every training prompt and from each other."""
        ...

    def demonstrations(self, step: int, count: int) -> list[tuple[Prompt, tuple[int, ...]]]:
        """Prompt and response ids (stop token last) for supervised step `step`."""
        ...

    def score(self, prompt: Prompt, completion: Completion) -> Score:
        """Verdict on one completion."""
        ...

    def text(self, completion: Completion) -> str:
        """What one completion says, without its stop token."""
        ...


class TelemetrySink(Protocol):
    """Somewhere metrics go. Called on rank 0 only."""

    def log_step(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """Metrics of one step; NaN is kept."""
        ...

    def log_rollouts(self, step: int, records: Sequence[dict[str, object]]) -> None:
        """One JSON-able record per completion."""
        ...

    def close(self) -> None:
        """Flush."""
        ...
