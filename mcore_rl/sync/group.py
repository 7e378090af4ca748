"""Several engines as one endpoint: every one is sent the same buckets at the same time, and every one is proved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from mcore_rl.sync.background import Background, attempt
from mcore_rl.sync.endpoint import SyncEndpoint
from mcore_rl.types import EngineDied

T = TypeVar("T")
E = TypeVar("E", bound=SyncEndpoint)
Layout = dict[str, dict[str, Any]]


class EndpointGroup(ABC, Generic[E]):
    """A SyncEndpoint over `members`. A call returns when all of them have answered, so a slot is free once it does."""

    @property
    @abstractmethod
    def members(self) -> Sequence[E]:
        """The engines that live, in a fixed order."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For messages."""

    def lost(self, member: E, death: EngineDied) -> None:
        """Hook: `member` died during a call."""

    def each(self, call: Callable[[E], T]) -> list[T]:
        """`call` of every member at the same time; results in their order.

        An error is raised after all have ended: what is wrong comes before who died. EngineDied when there are no members.
        """
        asked = [(member, call) for member in self.members]
        if not asked:
            raise EngineDied(f"no engine is left of {self.name}")
        found = self.outcomes(asked)
        errors = [outcome for outcome in found if isinstance(outcome, Exception)]
        errors.sort(key=lambda error: isinstance(error, EngineDied))
        if errors:
            raise errors[0]
        return [outcome for outcome in found if not isinstance(outcome, Exception)]

    def outcomes(self, calls: Sequence[tuple[E, Callable[[E], T]]]) -> list[T | Exception]:
        """Each call's result or error, all at the same time; a death is reported to `lost` too."""
        asked = [partial(call, member) for member, call in calls]
        if len(asked) < 2:
            found = [attempt(one) for one in asked]
        else:
            found = [running.outcome() for running in [Background(one, "engine-call") for one in asked]]
        for (member, _), outcome in zip(calls, found, strict=True):
            if isinstance(outcome, EngineDied):
                self.lost(member, outcome)
        return found

    def wait_ready(self) -> None:
        """Block until every engine has started."""
        self.each(lambda engine: engine.wait_ready())

    def layout(self) -> Layout:
        """HF name -> {shape, regions}, the regions of all engines in their order."""
        return merge_layouts(self.each(lambda engine: engine.layout()))

    def attach(self, path: str, slot_bytes: int) -> None:
        """Let every engine map the segment."""
        self.each(lambda engine: engine.attach(path, slot_bytes))

    def begin(self) -> None:
        """Open an update everywhere."""
        self.each(lambda engine: engine.begin())

    def load(self, slot: int, tensors: list[list[Any]]) -> None:
        """One bucket, written once, loaded by every engine."""
        self.each(lambda engine: engine.load(slot, tensors))

    def finish(self) -> list[str]:
        """Close the update everywhere; names received by the first engine. The proof asks every member."""
        return self.each(lambda engine: engine.finish())[0]

    def abort(self) -> None:
        """End an update that failed, on every engine that lives."""
        self.each(lambda engine: engine.abort())

    def readback(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Digests of all engines in their order."""
        found = self.each(lambda engine: engine.readback(names))
        return {name: [digest for digests in found for digest in digests[name]] for name in names}

    def reset_prefix_cache(self) -> None:
        """Drop keys and values of the old weights everywhere."""
        self.each(lambda engine: engine.reset_prefix_cache())

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """By the first engine; the proof asks every member."""
        return self.members[0].score(token_ids)

    def commit(self, version: int) -> None:
        """Set the proved version everywhere."""
        self.each(lambda engine: engine.commit(version))


def members(endpoint: SyncEndpoint) -> list[SyncEndpoint]:
    """The single engines behind an endpoint."""
    return list(endpoint.members) if isinstance(endpoint, EndpointGroup) else [endpoint]


def ask_each(endpoint: SyncEndpoint, call: Callable[[SyncEndpoint], T]) -> list[T]:
    """`call` of every single engine behind `endpoint`, at the same time."""
    return endpoint.each(call) if isinstance(endpoint, EndpointGroup) else [call(endpoint)]


def merge_layouts(layouts: Sequence[Layout]) -> Layout:
    """One layout whose regions are those of all engines, engine after engine."""
    merged: Layout = {}
    for layout in layouts:
        for name, entry in layout.items():
            known = merged.setdefault(name, {"shape": entry["shape"], "regions": []})
            known["regions"] += entry["regions"]
    return merged


def shares(
    layouts: Sequence[Mapping[str, Mapping[str, Any]]], expected: Mapping[str, Sequence[str]]
) -> list[dict[str, list[str]]]:
    """Digests over a merged layout, cut into those of each engine."""
    starts = dict.fromkeys(expected, 0)
    cut: list[dict[str, list[str]]] = []
    for layout in layouts:
        mine: dict[str, list[str]] = {}
        for name, digests in expected.items():
            count = len(layout[name]["regions"])
            mine[name] = list(digests[starts[name] : starts[name] + count])
            starts[name] += count
        cut.append(mine)
    return cut
