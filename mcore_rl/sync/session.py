"""A weight sync that cannot lie: sent, covered, read back, probed, and only then given its version.

`WeightSync.sync` is collective over the trainer's ranks. It either returns a report of a proved sync on all of them, or
raises on all of them; after a failure the engine has no version and refuses to sample until a complete sync.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from mcore_rl.config.schema import SyncConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.seams import WeightSource
from mcore_rl.sync.buckets import Bucket, plan_buckets, slot_bytes
from mcore_rl.sync.endpoint import SyncEndpoint
from mcore_rl.sync.engine_side import Asked, EngineSide, Watch
from mcore_rl.sync.group import ask_each, members, merge_layouts, shares
from mcore_rl.sync.proof import (
    ProbeResult,
    check_layout,
    check_probe,
    check_readback,
    check_same_version,
    check_version,
    compare_probe,
    readback_names,
)
from mcore_rl.sync.ranks import all_or_end, all_or_none, from_rank0, gather, is_rank0
from mcore_rl.sync.shm import Segment
from mcore_rl.sync.stream import Loader, send_buckets
from mcore_rl.types import EngineDied, SyncReport, TensorMeta, WeightMismatch

ProbeFn = Callable[[], Sequence[Sequence[float]]]


@dataclass(frozen=True)
class _Channel:
    """What the first sync sets up and later ones reuse."""

    metadata: tuple[TensorMeta, ...]
    plan: tuple[Bucket, ...]
    segment: Segment
    layout: Mapping[str, Mapping[str, Any]]


class WeightSync:
    """Keeps one engine, or a group of them, and the trainer one policy."""

    def __init__(self, engine: SyncEndpoint | None, config: SyncConfig, *, probe_sequences: Sequence[Sequence[int]]) -> None:
        """engine: on rank 0, None elsewhere. probe_sequences: token ids both engines score after every sync."""
        check_config(config, probe_sequences)
        self._engine = engine
        self._config = config
        self.resyncs = 0
        self._probe_sequences = [list(ids) for ids in probe_sequences]
        self._channel: _Channel | None = None
        self._created: Segment | None = None
        self._layouts: list[dict[str, dict[str, Any]]] = []
        self._proved = 0
        self._full_readback = True
        self._floor: ProbeResult | None = None

    def request_full_readback(self) -> None:
        """Read every tensor back at the next sync."""
        self._full_readback = True

    def measure_floor(self) -> None:
        """The next sync's probe differences become the floor that later ones are reported beside."""
        self._floor = None

    def renew(self) -> None:
        """Engines were replaced: the next sync sets everything up again and reads every tensor back. Collective."""
        self._channel = None
        self._full_readback = True

    def count_resync(self) -> None:
        """The next sync repeats one that failed: it sets everything up again and is counted. Collective."""
        self.resyncs += 1
        self.renew()

    def sync(self, source: WeightSource, probe: ProbeFn) -> SyncReport:
        """Bring the engine to `source`'s weights and prove it. probe: the trainer's log-probs of the probe sequences.

        Collective. Raises WeightMismatch, EngineDied or ValueError on every rank.
        """
        loader = Loader(self._engine)
        try:
            report = self._sync(source, probe, loader)
        except Exception as failure:
            self._give_up(loader, failure)
            if isinstance(failure, EngineRefused):  # what an engine cannot answer it has not proved
                raise WeightMismatch(str(failure)) from failure
            raise
        self._proved += 1
        self._full_readback = False
        return report

    def _sync(self, source: WeightSource, probe: ProbeFn, loader: Loader) -> SyncReport:
        watch = Watch()
        with watch.stage("prepare"):
            version = check_same_version(gather(source.version))
            with all_or_none():
                metadata = self._known(source.metadata())
            channel = self._open(metadata)
            names = readback_names(channel.metadata, 0 if self._full_readback else self._proved, self._config.readback_every)
            self._on_engine(lambda engine: engine.begin())
        with watch.stage("send"):
            sampled = {name: channel.layout[name] for name in names}
            contents = send_buckets(source, channel.plan, channel.segment, loader, sampled)
        with watch.stage("prove"):
            theirs = self._engine_side(Asked(channel.metadata, names, self._probe_sequences), loader.given_up)
            loader.then(theirs.ask)
            trainer: Sequence[Sequence[float]] = []
            # Not before everything is written: so it sees what became of the tensors that were handed out.
            with all_or_end():
                trainer = probe()
            with all_or_none():
                loader.wait()
            expected = {name: digests for part in gather(contents) for name, digests in part.items()}
            result, seconds = self._compare(theirs, expected, trainer)
        with all_or_none():
            check_version(version, source.version)
        self._on_engine(lambda engine: engine.commit(version))
        sent = sum(meta.nbytes for meta in channel.metadata)
        counts = (len(channel.metadata), sent, len(channel.plan), len(names))
        self._floor = floor = self._floor or result
        measured = (result.max_nats, result.mean_nats, {**watch.seconds, **seconds}, floor.max_nats, floor.mean_nats)
        return SyncReport(version, *counts, *measured)

    def _known(self, metadata: tuple[TensorMeta, ...]) -> tuple[TensorMeta, ...]:
        if self._channel is not None and metadata != self._channel.metadata:
            raise ValueError(
                "weight sync: the policy's tensors are not those of the first sync, which the engine was checked against"
            )
        return metadata

    def _open(self, metadata: tuple[TensorMeta, ...]) -> _Channel:
        if self._channel is None:
            self._channel = self._set_up(metadata)
        return self._channel

    def _set_up(self, metadata: tuple[TensorMeta, ...]) -> _Channel:
        plan = plan_buckets(metadata, self._config.bucket_bytes)
        size = slot_bytes(plan)
        layout = from_rank0(lambda: self._checked_layout(metadata))
        path = Path(from_rank0(lambda: str(self._create(size))))
        try:
            with all_or_none():
                segment = self._created if self._created is not None else Segment.attach(path, size)
            self._on_engine(lambda engine: engine.attach(str(path), size))
        finally:
            self._created = None
            if is_rank0():
                path.unlink(missing_ok=True)
        return _Channel(metadata, plan, segment, layout)

    def _create(self, size: int) -> Path:
        self._created = Segment.create(size)
        return self._created.path

    def _checked_layout(self, metadata: tuple[TensorMeta, ...]) -> dict[str, dict[str, Any]]:
        engine = self._rank0_engine()
        engine.wait_ready()
        self._layouts = ask_each(engine, lambda member: member.layout())
        for member, layout in zip(members(engine), self._layouts, strict=True):
            check_layout(member.name, layout, metadata)
        return merge_layouts(self._layouts)

    def _engine_side(self, asked: Asked, given_up: Event) -> EngineSide:
        return EngineSide(asked, given_up)

    def _compare(
        self, theirs: EngineSide, expected: Mapping[str, Sequence[str]], trainer: Sequence[Sequence[float]]
    ) -> tuple[ProbeResult, dict[str, float]]:
        """Every engine's digests and scores against the trainer's; the engines' seconds."""

        def compare() -> tuple[float, float, dict[str, float]]:
            mine = shares(self._layouts, expected)
            for name, ours, found in zip(theirs.engines, mine, theirs.digests, strict=True):
                check_readback(name, ours, found)
            results = [compare_probe(trainer, scores) for scores in theirs.scores()]
            for name, result in zip(theirs.engines, results, strict=True):
                check_probe(name, result, self._config.probe_max_nats, self._config.probe_mean_nats)
            return max(result.max_nats for result in results), max(result.mean_nats for result in results), theirs.seconds

        largest, mean, seconds = from_rank0(compare)
        return ProbeResult(largest, mean), seconds

    def _on_engine(self, action: Callable[[SyncEndpoint], None]) -> None:
        from_rank0(lambda: action(self._rank0_engine()))

    def _rank0_engine(self) -> SyncEndpoint:
        if self._engine is None:
            raise ValueError("weight sync: rank 0 was given no engine")
        return self._engine

    def _give_up(self, loader: Loader, failure: Exception) -> None:
        self._full_readback = True
        if self._engine is None:
            return
        for meanwhile in loader.settle():
            if meanwhile is not failure:
                failure.add_note(f"the engine meanwhile: {meanwhile}")
        with suppress(EngineDied, EngineRefused):
            self._engine.abort()


def check_config(config: SyncConfig, probe_sequences: Sequence[Sequence[int]]) -> None:
    """Refuse what could not prove anything (ValueError naming the key)."""
    if config.readback_every < 1:
        raise ValueError(f"sync.readback_every={config.readback_every} must be >= 1 (1 reads every tensor back at every sync)")
    if config.max_resyncs < 0:
        raise ValueError(f"sync.max_resyncs={config.max_resyncs} must be >= 0 (0 ends the run with the first failed proof)")
    if config.probe_mean_nats is not None and not config.probe_mean_nats > 0:
        raise ValueError(f"sync.probe_mean_nats={config.probe_mean_nats} must be > 0, or null for no bound")
    if not config.probe_max_nats > 0:
        raise ValueError(f"sync.probe_max_nats={config.probe_max_nats} must be > 0")
    if not probe_sequences or any(len(ids) < 2 for ids in probe_sequences):
        raise ValueError("weight sync: the probe needs at least one sequence, each of at least 2 tokens")
