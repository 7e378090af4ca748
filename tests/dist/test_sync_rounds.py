"""Live Megatron weights of every layout through the sync, three rounds: each time the engine gets exactly what is there now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from model_ranks import loaded
from tiny_models import stored_tensors, write_tiny

from mcore_rl.config.schema import SyncConfig
from mcore_rl.policy_weights import PolicyWeights
from mcore_rl.sync.digest import Region, content_digest, dtype_from_name, wire_digest
from mcore_rl.sync.session import WeightSync
from mcore_rl.sync.shm import Segment
from models.weights import ModelWeights
from parallel.layout import ParallelLayout

PROBE = [[1, 2, 3]]
VALUES = [[-1.0, -2.0]]
CASES = [
    ("qwen3_moe", ParallelLayout(world=2, pp=2), 20_000),
    ("qwen3_moe", ParallelLayout(world=2, pp=2), 1),
    ("qwen3_moe", ParallelLayout(world=2, tp=2, sp=True), 20_000),
    ("qwen3_moe", ParallelLayout(world=2, ep=2), 20_000),
    ("qwen3_moe", ParallelLayout(world=2), 20_000),
    ("qwen3_moe", ParallelLayout(world=4, tp=2, ep=2, sp=True), 20_000),
    ("qwen3_moe", ParallelLayout(world=4, ep=2, etp=2), 20_000),
    ("qwen3_moe", ParallelLayout(world=4, pp=2, vpp=2, ep=2), 20_000),
    ("llama_tied", ParallelLayout(world=2, pp=2), 20_000),
    ("qwen3_next", ParallelLayout(world=4, tp=2, ep=2, sp=True), 20_000),
]


class Stub:
    """An engine that keeps what it is sent, in the dtype it came in."""

    name = "stub"

    def __init__(self, metadata):
        self.metadata = metadata
        self.version = None

    def wait_ready(self):
        """At once."""

    def layout(self):
        return {meta.name: {"shape": list(meta.shape), "regions": [Region(meta.dtype).as_json()]} for meta in self.metadata}

    def attach(self, path, slot_bytes):
        self.segment = Segment.attach(Path(path), slot_bytes)

    def begin(self):
        self.version, self.held, self.buckets = None, {}, 0

    def load(self, slot, tensors):
        self.buckets += 1
        for name, dtype, shape, offset, digest in tensors:
            value = self.segment.view(slot, offset, dtype_from_name(dtype), tuple(shape))
            assert wire_digest(value) == digest
            assert name not in self.held
            self.held[name] = value.clone()

    def finish(self):
        return list(self.held)

    def abort(self):
        self.version = None

    def readback(self, names):
        return {name: [content_digest(self.held[name], Region(self.held[name].dtype))] for name in names}

    def reset_prefix_cache(self):
        """Nothing cached."""

    def score(self, token_ids):
        return VALUES

    def commit(self, version):
        self.version = version


def three_rounds(groups, device, folder, bucket_bytes, *, rebuilt=False):
    """Every parameter moved by the round's number on the ranks that own it; what the stub holds after each sync.

    rebuilt: every round has modules of its own, through the one session.
    """
    session, stub, held, version = None, None, [], {"now": 0}
    for number in range(3):
        version["now"] = number
        if rebuilt or session is None:
            spec, chunks = loaded(groups, folder)
            start = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
            source = PolicyWeights(ModelWeights(chunks, spec, groups), lambda: version["now"])
        if session is None:
            stub = Stub(source.metadata()) if dist.get_rank() == 0 else None
            session = WeightSync(stub, SyncConfig(bucket_bytes=bucket_bytes, readback_every=1), probe_sequences=PROBE)
        with torch.no_grad():
            for parameter, value in zip((p for chunk in chunks for p in chunk.parameters()), start, strict=True):
                parameter.copy_(value + number)
        report = session.sync(source, lambda: VALUES)
        held.append((report.version, report.buckets, stub and dict(stub.held)))
    return held


@pytest.mark.parametrize(("family", "layout", "bucket_bytes"), CASES, ids=str)
def test_three_rounds(ranks, tmp_path, family, layout, bucket_bytes):
    write_tiny(tmp_path, family)
    stored = stored_tensors(tmp_path)
    check_rounds(stored, ranks.run(three_rounds, layout, str(tmp_path), bucket_bytes))


def test_modules_built_anew_for_every_round(ranks, tmp_path):
    write_tiny(tmp_path, "qwen3_moe")
    stored = stored_tensors(tmp_path)
    check_rounds(stored, ranks.run(three_rounds, ParallelLayout(world=2, pp=2), str(tmp_path), 20_000, rebuilt=True))


def check_rounds(stored, results):
    """Every tensor once, in every round what its owner held then, and the same report on every rank."""
    first, *others = results
    for number, (version, buckets, held) in enumerate(first):
        assert version == number
        assert buckets >= 4
        assert set(held) == set(stored)
        for name, value in stored.items():
            assert torch.equal(held[name], value + number), (number, name)
    assert all([row[:2] for row in other] == [row[:2] for row in first] for other in others)
