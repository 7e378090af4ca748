"""The engine closes, reads back and scores while the trainer scores: what each side's failure does to the other."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from fleet_stubs import Made
from fleet_stubs import Source as FleetSource
from session_stubs import VALUES, Source, Stub, session

from mcore_rl.sync.background import Background
from mcore_rl.types import EngineDied, WeightMismatch


class Noted(Source):
    """Notes which tensors were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def bucket(self, names):
        self.asked += names
        return super().bucket(names)


def test_the_trainer_scores_when_everything_is_written():
    """A change after any tensor was handed out shows in its scores."""
    source, seen = Noted(), []
    session(Stub()).sync(source, lambda: (seen.append(list(source.asked)), VALUES)[1])
    assert seen == [["t0", "t1", "t2", "t3", "t4"]]


def test_the_engine_is_through_before_the_trainer_has_scored():
    """Each side waits for nothing of the other's: the trainer's scores come after the engine's."""
    stub, scored = Stub(), threading.Event()
    score = stub.score
    stub.score = lambda ids: (score(ids), scored.set())[0]

    def probe():
        assert scored.wait(20)
        return VALUES

    assert session(stub).sync(Source(4), probe).version == 4


def test_the_seconds_of_both_sides_are_reported():
    stub = Stub()
    stub.readback = lambda names, real=stub.readback: (time.sleep(0.05), real(names))[1]
    seconds = session(stub).sync(Source(), lambda: VALUES).seconds
    assert set(seconds) == {"prepare", "send", "prove", "finish", "readback", "probe"}
    assert 0.05 <= seconds["readback"] <= seconds["prove"]


def test_a_failed_probe_does_not_wait_for_the_whole_proof():
    """The call in flight ends, the next is not begun, and the update is closed by abort."""
    stub, failed = Stub(), threading.Event()
    finish = stub.finish

    def slow():
        assert failed.wait(20)
        time.sleep(0.05)
        return finish()

    def probe():
        failed.set()
        raise ValueError("probe: no such expert")

    stub.finish = slow
    with pytest.raises(ValueError, match="no such expert"):
        session(stub).sync(Source(), probe)
    assert "readback" not in stub.calls and "score" not in stub.calls
    assert stub.calls[-1] == "abort" and stub.version is None


def test_what_became_of_the_engine_meanwhile_is_noted_on_the_trainers_failure():
    stub, dead = Stub(), threading.Event()

    def dies():
        dead.set()
        raise EngineDied("stub died in finish")

    def probe():
        assert dead.wait(20)
        raise ValueError("probe: odd")

    stub.finish = dies
    with pytest.raises(ValueError, match="odd") as caught:
        session(stub).sync(Source(), probe)
    assert caught.value.__notes__ == ["the engine meanwhile: stub died in finish"]


def test_what_the_weights_are_is_said_before_how_they_score():
    """An engine that scores NaN, or refuses to, because a tensor is wrong: the tensor is named."""
    stub = Stub()
    sync = session(stub, readback_every=1)
    sync.sync(Source(0), lambda: VALUES)
    stub.ignores, stub.fail = "t3", ("score", WeightMismatch("log-prob is NaN"))
    with pytest.raises(WeightMismatch, match="read back differ from the trainer's: t3"):
        sync.sync(Source(1, 2.0), lambda: VALUES)


@pytest.mark.parametrize("member", [0, 1, 2])
def test_every_member_of_a_group_is_asked_what_it_received(member):
    """Also the first, whose list stands for the group's."""
    made = Made(3)
    made.engines[member].finish = lambda: ["t0", "t1", "t3", "t4"]
    with pytest.raises(WeightMismatch, match=rf"^engine{member}\.{member}: 1 tensors never arrived: t2$"):
        made.synced()
    assert made.fleet.version is None


def test_a_group_without_members_is_a_death():
    made = Made(2)
    for engine in made.engines:
        engine.dies_in = "everything"
    with pytest.raises(EngineDied):
        made.fleet.health()
    with pytest.raises(EngineDied, match=r"^no engine is left of 2 engines: engine0\.0; engine1\.1$"):
        made.sync.sync(FleetSource(), lambda: VALUES)


def test_a_refused_engine_that_dies_when_its_update_is_aborted_can_be_replaced():
    made = Made(1).synced()
    made.engines[0].wrong = True
    made.sync.request_full_readback()
    made.engines[0].dies_in = "abort"
    with pytest.raises(WeightMismatch, match="t2"):
        made.sync.sync(FleetSource(), lambda: VALUES)
    assert made.fleet.losses == 1
    with pytest.raises(EngineDied, match="no engine is left"):
        made.sync.sync(FleetSource(), lambda: VALUES)
    made.recover()
    assert made.fleet.version == 3


class OddError(Exception):
    """Nothing anybody expects."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_of_an_unknown_kind_in_the_background_is_told():
    def fails():
        raise OddError("odd")

    with pytest.raises(OddError, match="odd"):
        Background(fails, "test").result()


def test_a_source_of_one_rank_is_sent_whole():
    stub = Stub()
    session(stub).sync(Source(0, 3.0), lambda: VALUES)
    assert all(torch.equal(stub.held[name], tensor) for name, tensor in Source(0, 3.0))
