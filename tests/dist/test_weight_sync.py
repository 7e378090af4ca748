"""A weight sync with two trainer ranks and a stub for the engine on rank 0."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mcore_rl.config.schema import SyncConfig
from mcore_rl.sync.digest import Region, content_digest, dtype_from_name, wire_digest
from mcore_rl.sync.session import WeightSync
from mcore_rl.sync.shm import Segment
from mcore_rl.types import TensorMeta, WeightMismatch
from parallel.layout import ParallelLayout

TWO = ParallelLayout(world=2)
PROBE = [[1, 2, 3]]
VALUES = [[-1.0, -2.0]]
COUNT = 9


class Source:
    """Rank 1 holds every third tensor, so that some buckets have nothing of rank 1's and one nothing of rank 0's."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.tensors = {f"t{i}": torch.full((i + 1, 16), float(10 * version + i)) for i in range(COUNT)}
        self.broken: str | None = None

    def metadata(self):
        return tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items())

    def held_names(self):
        return frozenset(name for i, name in enumerate(self.tensors) if (i % 3 == 2) == (dist.get_rank() == 1))

    def bucket(self, names):
        dist.barrier()
        held = self.held_names()
        for name in names:
            if name in held:
                if name == self.broken:
                    raise OSError(28, f"no space for {name}")
                yield name, self.tensors[name]


class Stub:
    """An engine that keeps what it is sent."""

    name = "stub"

    def __init__(self, fail_at: int | None = None) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.received: list[str] = []
        self.fail_at = fail_at
        self.version: int | None = None

    def wait_ready(self):
        """At once."""

    def layout(self):
        return {f"t{i}": {"shape": [i + 1, 16], "regions": [Region(torch.float32).as_json()]} for i in range(COUNT)}

    def attach(self, path, slot_bytes):
        self.segment = Segment.attach(Path(path), slot_bytes)

    def begin(self):
        self.version, self.received = None, []

    def load(self, slot, tensors):
        for name, dtype, shape, offset, digest in tensors:
            if len(self.received) == self.fail_at:
                raise WeightMismatch(f"stub refused {name}")
            value = self.segment.view(slot, offset, dtype_from_name(dtype), tuple(shape))
            assert wire_digest(value) == digest
            self.received.append(name)
            self.held[name] = value.clone()

    def finish(self):
        return self.received

    def abort(self):
        self.version = None

    def readback(self, names):
        return {name: [content_digest(self.held[name], Region(torch.float32))] for name in names}

    def reset_prefix_cache(self):
        """Nothing cached."""

    def score(self, token_ids):
        return VALUES

    def commit(self, version):
        self.version = version


def three_syncs(groups, device, bucket_bytes):
    stub = Stub() if dist.get_rank() == 0 else None
    session = WeightSync(stub, SyncConfig(bucket_bytes=bucket_bytes), probe_sequences=PROBE)
    reports = [session.sync(Source(version), lambda: VALUES) for version in range(3)]
    right = stub is None or all(torch.equal(stub.held[name], value) for name, value in Source(2).tensors.items())
    order = stub is None or stub.received == list(Source(2).tensors)
    return [(r.version, r.tensors, r.buckets, r.readback_tensors) for r in reports], right, order, stub and stub.version


# 64, 128 ... 576 bytes: with 1000 the first bucket takes 64 + 128 of a quarter, then 192 + 256 + 320, 384 + 448, 512, 576.
@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(1, COUNT), (1000, 5), (10**6, 1)])
def test_each_rank_writes_what_it_holds(ranks, bucket_bytes, buckets):
    first, second = ranks.run(three_syncs, TWO, bucket_bytes)
    assert first == ([(0, 9, buckets, 9), (1, 9, buckets, 1), (2, 9, buckets, 1)], True, True, 2)
    assert second[0] == first[0]


def outcome(call):
    try:
        return "returned", str(call())
    except (RuntimeError, OSError, ValueError) as error:
        return type(error).__name__, str(error)


def engine_refuses(groups, device, fail_at):
    stub = Stub(fail_at) if dist.get_rank() == 0 else None
    session = WeightSync(stub, SyncConfig(bucket_bytes=1), probe_sequences=PROBE)
    failed = outcome(lambda: session.sync(Source(0), lambda: VALUES))
    if stub is not None:
        stub.fail_at = None
    return failed, session.sync(Source(1), lambda: VALUES).version, stub and stub.version


@pytest.mark.parametrize("fail_at", [0, 4, COUNT - 1])
def test_a_refusal_in_the_middle_is_raised_on_both_ranks(ranks, fail_at):
    first, second = ranks.run(engine_refuses, TWO, fail_at)
    assert first == (("WeightMismatch", f"stub refused t{fail_at}"), 1, 1)
    assert second == (("WeightMismatch", f"rank 0: stub refused t{fail_at}"), 1, None)


def rank1_breaks(groups, device):
    stub = Stub() if dist.get_rank() == 0 else None
    session = WeightSync(stub, SyncConfig(bucket_bytes=1), probe_sequences=PROBE)
    source = Source(0)
    source.broken = "t5"
    failed = outcome(lambda: session.sync(source, lambda: VALUES))
    return failed[0], "no space for t5" in failed[1], session.sync(Source(1), lambda: VALUES).version, stub and stub.version


def test_a_failing_rank_stops_both(ranks):
    first, second = ranks.run(rank1_breaks, TWO)
    assert first[1:] == (True, 1, 1)
    assert second == ("OSError", True, 1, None)


def probe_breaks_on_rank1(groups, device):
    stub = Stub() if dist.get_rank() == 0 else None
    session = WeightSync(stub, SyncConfig(), probe_sequences=PROBE)

    def probe():
        if dist.get_rank() == 1:
            raise ValueError("no forward")
        return VALUES

    return outcome(lambda: session.sync(Source(0), probe)), stub and stub.version


def test_a_failing_probe_stops_both(ranks):
    first, second = ranks.run(probe_breaks_on_rank1, TWO)
    assert first == (("ValueError", "rank 1: no forward"), None)
    assert second[0] == ("ValueError", "no forward")


def nobody_writes(groups, device):
    stub = Stub() if dist.get_rank() == 0 else None
    source = Source(0)
    source.held_names = lambda: frozenset(f"t{i}" for i in range(8)) if dist.get_rank() == 0 else frozenset()
    return outcome(lambda: WeightSync(stub, SyncConfig(), probe_sequences=PROBE).sync(source, lambda: VALUES))


def test_a_tensor_no_rank_holds_stops_both(ranks):
    for kind, message in ranks.run(nobody_writes, TWO):
        assert kind == "WeightMismatch"
        assert "t8 is held by 0 ranks" in message
