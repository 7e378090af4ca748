"""Sending: every rank writes the tensors it holds, rank 0 lets the engine load; two buckets are under way at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from threading import Event
from typing import Any

from torch import Tensor

from mcore_rl.seams import WeightSource
from mcore_rl.sync.background import Background
from mcore_rl.sync.buckets import Bucket, Slot
from mcore_rl.sync.digest import wire_digest
from mcore_rl.sync.endpoint import SyncEndpoint
from mcore_rl.sync.proof import region_digests
from mcore_rl.sync.ranks import all_or_end, all_or_none, gather
from mcore_rl.sync.shm import SLOTS, Segment
from mcore_rl.types import WeightMismatch


class Loader:
    """Calls to the engine, one after the other, in the background: it goes on while buckets are written and the trainer
    scores. Without engine: nothing."""

    def __init__(self, endpoint: SyncEndpoint | None) -> None:
        """endpoint is None on every rank but 0."""
        self._endpoint = endpoint
        self._running: deque[Background[None]] = deque()
        self.given_up = Event()

    def start(self, slot: int, tensors: list[list[Any]]) -> None:
        """Load a bucket once those before it are loaded; after one that failed, fail with its error."""
        if self._endpoint is not None:
            self._follow(partial(self._endpoint.load, slot, tensors), f"weight sync: loading slot {slot}")

    def then(self, call: Callable[[SyncEndpoint], None]) -> None:
        """`call` of the engine, in its turn, as `start`."""
        if self._endpoint is not None:
            self._follow(partial(call, self._endpoint), "weight sync: the engine's side of the proof")

    def wait(self, most: int = 0) -> None:
        """Until at most `most` calls are under way, in their order; a failed one's error is raised."""
        while len(self._running) > most:
            self._running.popleft().result()

    def settle(self) -> list[Exception]:
        """Begin no call any more and wait for the one in flight; the errors of those that were not waited for, each once."""
        self.given_up.set()
        errors: list[Exception] = []
        while self._running:
            outcome = self._running.popleft().outcome()
            if isinstance(outcome, Exception) and not any(outcome is known for known in errors):
                errors.append(outcome)
        return errors

    def _follow(self, call: Callable[[], None], name: str) -> None:
        before = self._running[-1] if self._running else None
        self._running.append(Background(partial(self._after, before, call), name))

    def _after(self, before: Background[None] | None, call: Callable[[], None]) -> None:
        if before is not None:
            before.result()
        if not self.given_up.is_set():
            call()


def send_buckets(
    source: WeightSource,
    plan: Sequence[Bucket],
    segment: Segment,
    loader: Loader,
    sampled: Mapping[str, Mapping[str, Any]],
) -> dict[str, list[str]]:
    """Write every bucket; the last ones may still be loading. sampled: layout entries, by name, of the tensors to
    fingerprint; returns the region digests of those this rank holds.

    Collective. An error on any rank, or in the engine, is raised on all of them; one in the middle of the policy's own
    collectives (a bucket's gathers) ends that rank's process, and its launcher the others.
    """
    with all_or_none():
        held = source.held_names()
    contents: dict[str, list[str]] = {}
    for bucket in plan:
        slot = bucket.index % SLOTS
        digests: dict[str, str] = {}
        with all_or_none():  # no rank writes into a slot that the engine, which rank 0 alone talks to, still reads
            loader.wait(SLOTS - 1)
        with all_or_end():
            digests = _write(source, bucket, segment, held=held, sampled=sampled, contents=contents)
        loader.start(slot, _manifest(bucket, gather(digests)))
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
    """Copy this rank's tensors of the bucket into its slot; returns their wire digests.

    The bucket is drawn to its end whatever is wrong with it: the other ranks' gathers need this one.
    """
    slots = {slot.meta.name: slot for slot in bucket.slots}
    digests: dict[str, str] = {}
    failure: Exception | None = None
    for name, tensor in source.bucket(bucket.names):
        if failure is not None:
            continue
        try:
            if name not in slots or name in digests:
                problem = "twice" if name in digests else f"unasked; bucket {bucket.index} starts with {bucket.names[0]}"
                raise WeightMismatch(f"weights: the policy handed out {name} {problem}")
            if name in held:
                ours = _put(segment, bucket.index % SLOTS, slots[name], tensor)
                digests[name] = wire_digest(ours)
                if name in sampled:
                    contents[name] = region_digests(ours, sampled[name])
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            failure = error
    if failure is not None:
        raise failure
    absent = [name for name in bucket.names if name in held and name not in digests]
    if absent:
        raise WeightMismatch(f"weights: the policy holds {absent[0]} but did not hand it out")
    return digests


def _put(segment: Segment, index: int, slot: Slot, tensor: Tensor) -> Tensor:
    """Copy a tensor to its place; what was copied, on the CPU."""
    meta = slot.meta
    if tuple(tensor.shape) != meta.shape or tensor.dtype != meta.dtype:
        raise WeightMismatch(
            f"weights: {meta.name} came as {list(tensor.shape)} {tensor.dtype}, declared {list(meta.shape)} {meta.dtype}"
        )
    ours = tensor.detach().to("cpu").contiguous()
    segment.view(index, slot.offset, meta.dtype, meta.shape).copy_(ours)
    return ours


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
