"""Sending: every rank writes the tensors it holds, rank 0 lets the engine load; the two overlap by one bucket."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from mcore_rl.seams import WeightSource
from mcore_rl.sync.background import Background
from mcore_rl.sync.buckets import Bucket
from mcore_rl.sync.digest import wire_digest
from mcore_rl.sync.endpoint import SyncEndpoint
from mcore_rl.sync.proof import region_digests
from mcore_rl.sync.ranks import all_or_none, gather
from mcore_rl.sync.shm import SLOTS, Segment
from mcore_rl.types import WeightMismatch


class Loader:
    """One load at a time, in the background, so the next bucket is written meanwhile. On ranks without engine: nothing."""

    def __init__(self, endpoint: SyncEndpoint | None) -> None:
        """endpoint is None on every rank but 0."""
        self._endpoint = endpoint
        self._running: Background[None] | None = None

    def start(self, slot: int, tensors: list[list[Any]]) -> None:
        """Begin loading a bucket. The previous one must have been waited for."""
        if self._endpoint is not None:
            self._running = Background(partial(self._endpoint.load, slot, tensors), f"weight sync: loading slot {slot}")

    def wait(self) -> None:
        """The bucket in flight is loaded, or its error is raised."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def settle(self) -> None:
        """Nothing is in flight any more, whatever came of it."""
        running, self._running = self._running, None
        if running is not None:
            running.outcome()


def send_buckets(
    source: WeightSource, plan: Sequence[Bucket], segment: Segment, loader: Loader, *, sampled: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[str]]:
    """Send every bucket; returns the region digests of the `sampled` tensors (name -> layout entry) this rank holds.

    Collective. An error on any rank, or in the engine, is raised on all of them.
    """
    held = source.held_names()
    contents: dict[str, list[str]] = {}
    for bucket in plan:
        slot = bucket.index % SLOTS
        digests: dict[str, str] = {}
        with all_or_none():
            digests = _write(source, bucket, segment, held=held, sampled=sampled, contents=contents)
            loader.wait()
        loader.start(slot, _manifest(bucket, gather(digests)))
    with all_or_none():
        loader.wait()
    return contents


def _write(
    source: WeightSource,
    bucket: Bucket,
    segment: Segment,
    *,
    held: Collection[str],
    sampled: Mapping[str, Mapping[str, Any]],
    contents: dict[str, list[str]],
) -> dict[str, str]:
    """Copy this rank's tensors of the bucket into its slot; returns their wire digests."""
    slots = {slot.meta.name: slot for slot in bucket.slots}
    digests: dict[str, str] = {}
    for name, tensor in source.bucket(bucket.names):
        if name not in slots or name in digests:
            problem = "twice" if name in digests else f"unasked; bucket {bucket.index} starts with {bucket.names[0]}"
            raise WeightMismatch(f"weights: the policy handed out {name} {problem}")
        meta = slots[name].meta
        if name not in held:
            continue
        if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
            raise WeightMismatch(
                f"weights: {name} came as {list(tensor.shape)} {tensor.dtype}, declared {list(meta.shape)} {meta.dtype}"
            )
        ours = tensor.detach().to("cpu").contiguous()
        segment.view(bucket.index % SLOTS, slots[name].offset, meta.dtype, meta.shape).copy_(ours)
        digests[name] = wire_digest(ours)
        if name in sampled:
            contents[name] = region_digests(ours, sampled[name])
    absent = [name for name in bucket.names if name in held and name not in digests]
    if absent:
        raise WeightMismatch(f"weights: the policy holds {absent[0]} but did not hand it out")
    return digests


def _manifest(bucket: Bucket, by_rank: Sequence[Mapping[str, str]]) -> list[list[Any]]:
    """What the engine is told about the bucket. WeightMismatch when a tensor has no writer, or two."""
    rows: list[list[Any]] = []
    for slot in bucket.slots:
        meta = slot.meta
        written = [digests[meta.name] for digests in by_rank if meta.name in digests]
        if len(written) != 1:
            raise WeightMismatch(f"weights: {meta.name} is held by {len(written)} ranks; exactly one must write it")
        rows.append([meta.name, str(meta.dtype).removeprefix("torch."), list(meta.shape), slot.offset, written[0]])
    return rows
