"""What a sync asks of the engines once the last bucket is on its way: close the update, read back, score.

Rank 0 lets it run in the background, after the last load, while all ranks score the probe themselves. It only collects:
the comparison needs the trainer's numbers, and what the weights are is said before how they score.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event

from mcore_rl.sync.background import attempt
from mcore_rl.sync.endpoint import SyncEndpoint
from mcore_rl.sync.group import ask_each, members
from mcore_rl.sync.proof import check_coverage
from mcore_rl.types import TensorMeta, WeightMismatch


@dataclass
class Watch:
    """Seconds per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time what is inside; a stage that fails has no time."""
        started = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - started


@dataclass(frozen=True)
class Asked:
    """metadata: of the whole model. names: tensors to read back. sequences: token ids to score."""

    metadata: Sequence[TensorMeta]
    names: Sequence[str]
    sequences: Sequence[Sequence[int]]


class EngineSide:
    """The answers of every single engine, in the order of `engines`."""

    def __init__(self, asked: Asked, given_up: Event) -> None:
        """given_up: set when the trainer's side has failed; nothing more is asked then."""
        self._asked = asked
        self._given_up = given_up
        self._watch = Watch()
        self._scores: list[list[list[float]]] | Exception = []
        self.engines: list[str] = []
        self.digests: list[dict[str, list[str]]] = []

    @property
    def seconds(self) -> dict[str, float]:
        """Of each stage that was reached."""
        return self._watch.seconds

    def ask(self, endpoint: SyncEndpoint) -> None:
        """Everything, one after the other. Raises EngineDied, EngineRefused or WeightMismatch; a score that fails is kept."""
        self.engines = [member.name for member in members(endpoint)]
        with self._stage("finish"):
            received = ask_each(endpoint, lambda member: member.finish())
            for name, names in zip(self.engines, received, strict=True):
                check_coverage(name, names, self._asked.metadata)
        with self._stage("readback"):
            self.digests = ask_each(endpoint, lambda member: member.readback(self._asked.names))
        with self._stage("probe"):
            self._scores = attempt(lambda: self._score(endpoint))

    def scores(self) -> list[list[list[float]]]:
        """Log-probs (nats) of every token after the first, by engine and sequence; or the error that scoring ended with."""
        if isinstance(self._scores, Exception):
            raise self._scores
        return self._scores

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        if self._given_up.is_set():
            raise WeightMismatch(f"weight sync: given up before '{name}'")
        with self._watch.stage(name):
            yield

    def _score(self, endpoint: SyncEndpoint) -> list[list[list[float]]]:
        ask_each(endpoint, lambda member: member.reset_prefix_cache())
        return ask_each(endpoint, lambda member: member.score(self._asked.sequences))
