"""The order of a sync and what a failure leaves behind, with a stub for the engine."""

from __future__ import annotations

import math

import pytest
import torch
from session_stubs import PROBE, VALUES, Source, Stub, session

from mcore_rl.config.schema import SyncConfig
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import EngineDied, WeightMismatch


def test_the_order_of_a_proved_sync():
    stub = Stub()
    sync = session(stub)
    report = sync.sync(Source(3), lambda: VALUES)
    loads = [f"load{i}" for i in range(5)]
    proof = ["finish", "readback", "reset_prefix_cache", "score", "commit"]
    assert stub.calls == ["wait_ready", "attach", "begin", *loads, *proof]
    assert (report.version, report.tensors, report.buckets, report.readback_tensors, report.bytes) == (3, 5, 5, 5, 480)
    assert (report.probe_max_nats, stub.version) == (0.0, 3)
    stub.calls.clear()
    second = sync.sync(Source(4, 2.0), lambda: VALUES)
    assert stub.calls == ["begin", *loads, *proof]
    assert second.readback_tensors < 5
    assert all(torch.equal(stub.held[name], tensor) for name, tensor in Source(4, 2.0))


def test_the_floor_is_the_first_probe():
    """What later syncs are read against: the first one sends what the engine started with."""
    sync = session(Stub(), probe_max_nats=1.0)
    first = sync.sync(Source(0), lambda: [[-1.25, -2.0], [-3.0]])
    later = sync.sync(Source(1), lambda: [[-1.5, -2.0], [-3.0]])
    assert (first.floor_max_nats, later.floor_max_nats, later.probe_max_nats) == (0.25, 0.25, 0.5)
    assert first.floor_mean_nats == later.floor_mean_nats == 0.25 / 3
    sync.measure_floor()
    renewed = sync.sync(Source(1), lambda: [[-1.0, -2.0], [-2.875]])
    assert (renewed.floor_max_nats, renewed.probe_max_nats) == (0.125, 0.125)
    assert sync.sync(Source(2), lambda: VALUES).floor_max_nats == 0.125


def test_a_policy_that_steps_during_a_sync_is_named():
    """The engine would hold tensors of two versions."""
    stub, source = Stub(), Source(4)

    def probe():
        source.version = 5
        return VALUES

    with pytest.raises(WeightMismatch, match="went from version 4 to 5 during the sync"):
        session(stub).sync(source, probe)
    assert "commit" not in stub.calls


def test_all_in_one_bucket_is_one_start_and_one_finish():
    stub = Stub()
    session(stub, bucket_bytes=10_000).sync(Source(), lambda: VALUES)
    assert [call for call in stub.calls if call.startswith(("begin", "load", "finish"))] == ["begin", "load0", "finish"]


@pytest.mark.parametrize(
    "call", ["begin", "load0", "load2", "load4", "finish", "readback", "reset_prefix_cache", "score", "commit"]
)
@pytest.mark.parametrize("error", [WeightMismatch("HTTP 500"), EngineDied("no answer"), ValueError("odd")])
def test_a_failure_anywhere_leaves_no_version_and_the_next_sync_is_clean(call, error):
    stub = Stub()
    sync = session(stub)
    sync.sync(Source(0), lambda: VALUES)
    stub.fail = (call, error)
    with pytest.raises(type(error), match=str(error)):
        sync.sync(Source(1, 2.0), lambda: VALUES)
    assert stub.version is None
    assert stub.calls[-1] == "abort"
    assert stub.calls.count("commit") == (2 if call == "commit" else 1)
    stub.fail = None
    stub.calls.clear()
    report = sync.sync(Source(1, 2.0), lambda: VALUES)
    assert (report.version, stub.version, report.readback_tensors) == (1, 1, 5)
    assert stub.calls[-5:] == ["finish", "readback", "reset_prefix_cache", "score", "commit"]


def test_an_engine_that_dies_twice_reports_the_first_death():
    stub = Stub()
    sync = session(stub)
    stub.fail = ("load2", EngineDied("in load"))
    stub.abort = lambda: (_ for _ in ()).throw(EngineDied("in abort"))
    with pytest.raises(EngineDied, match="in load"):
        sync.sync(Source(), lambda: VALUES)


def test_an_ignored_tensor_is_read_back_as_the_old_one():
    stub = Stub()
    sync = session(stub, readback_every=1)
    sync.sync(Source(0), lambda: VALUES)
    stub.ignores = "t3"
    with pytest.raises(WeightMismatch, match="1 of 5 tensors read back differ from the trainer's: t3"):
        sync.sync(Source(1, 2.0), lambda: VALUES)


def test_a_source_that_skips_changes_repeats_or_invents_a_tensor_is_named():
    stub = Stub()
    skipping, reshaping = Source(), Source()
    skipping.bucket = lambda names: iter([(name, skipping.tensors[name]) for name in names if name != "t2"])
    reshaping.bucket = lambda names: iter([(name, reshaping.tensors[name].t()) for name in names])
    with pytest.raises(WeightMismatch, match="holds t2 but did not hand it out"):
        session(stub).sync(skipping, lambda: VALUES)
    with pytest.raises(WeightMismatch, match=r"t0 came as \[8, 1\] torch.float32, declared \[1, 8\]"):
        session(stub).sync(reshaping, lambda: VALUES)
    repeating, inventing = Source(), Source()
    repeating.bucket = lambda names: iter([(name, repeating.tensors[name]) for name in names for _ in range(2)])
    inventing.bucket = lambda names: iter([(f"{name}x", inventing.tensors[name]) for name in names])
    with pytest.raises(WeightMismatch, match="handed out t0 twice"):
        session(stub).sync(repeating, lambda: VALUES)
    with pytest.raises(WeightMismatch, match="handed out t0x unasked"):
        session(stub).sync(inventing, lambda: VALUES)


def test_a_tensor_without_a_writer_is_named():
    source = Source()
    source.held_names = lambda: frozenset(source.tensors) - {"t4"}
    with pytest.raises(WeightMismatch, match="t4 is held by 0 ranks; exactly one must write it"):
        session(Stub()).sync(source, lambda: VALUES)


@pytest.mark.parametrize("trainer", [[[-1.0, -2.1], [-3.0]], [[-1.0, math.nan], [-3.0]]])
def test_a_probe_that_disagrees_stops_the_sync(trainer):
    stub = Stub()
    with pytest.raises(WeightMismatch, match="probe log-probs differ"):
        session(stub).sync(Source(), lambda: trainer)
    assert "commit" not in stub.calls


def test_other_tensors_than_at_the_first_sync_are_refused():
    stub = Stub()
    sync = session(stub)
    sync.sync(Source(), lambda: VALUES)
    other = Source(1)
    other.tensors["t0"] = torch.zeros(2, 8)
    with pytest.raises(ValueError, match="not those of the first sync"):
        sync.sync(other, lambda: VALUES)


@pytest.mark.parametrize(
    ("config", "probe", "message"),
    [
        ({"readback_every": 0}, PROBE, r"sync\.readback_every=0"),
        ({"probe_max_nats": 0.0}, PROBE, r"sync\.probe_max_nats=0\.0"),
        ({}, [], "at least one sequence"),
        ({}, [[1]], "at least 2 tokens"),
    ],
)
def test_a_session_that_could_prove_nothing_is_refused(config, probe, message):
    with pytest.raises(ValueError, match=message):
        WeightSync(None, SyncConfig(**config), probe_sequences=probe)


def test_no_engine_on_rank_0_is_said():
    with pytest.raises(ValueError, match="rank 0 was given no engine"):
        session(None).sync(Source(), lambda: VALUES)


class Drawn(Source):
    """Hands a tensor of the wrong shape out first; counts what was drawn after it, as gathers of other ranks would need."""

    drawn = 0

    def bucket(self, names):
        for name in names:
            yield name, self.tensors[name] if name != "t0" else torch.zeros(2)
            self.drawn += 1


def test_a_bucket_is_drawn_to_its_end_whatever_is_wrong_with_it():
    source = Drawn()
    with pytest.raises(WeightMismatch, match=r"t0 came as \[2\]"):
        session(Stub(), bucket_bytes=10_000).sync(source, lambda: VALUES)
    assert source.drawn == 5
