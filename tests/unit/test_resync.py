"""What follows a failed proof, by `sync.on_failed_proof`. Engines are stubs."""

from __future__ import annotations

import pytest
import torch
from fleet_stubs import PROMPTS, SAMPLING, TENSORS, VALUES, Engine, Made, Source, drawn, expected

from mcore_rl.config.schema import OnFailedProof, SyncConfig
from mcore_rl.errors import EngineRefused
from mcore_rl.sync.resync import proved_or_resynced
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import EngineDied, StaleRollout, WeightMismatch

RESYNC = OnFailedProof.resync


class Faulty(Engine):
    """Its `call` fails `times` times: with `error`, or by loading zeros for t2 where there is none."""

    def __init__(self, name: str, call: str, times: int, error: Exception | None) -> None:
        super().__init__(name)
        self.call, self.times, self.error = call, times, error
        self.calls: list[str] = []
        self.read_back: list[int] = []

    def _step(self, call):
        self.calls.append(call)
        super()._step(call)
        if call == self.call and self.times and self.error:
            self.times -= 1
            raise self.error

    def load(self, slot, tensors):
        super().load(slot, tensors)
        if self.call == "zero" and self.times and "t2" in self.held and tensors[0][0] == "t2":
            self.times -= 1
            self.held["t2"] = torch.zeros(3, 8)

    def readback(self, names):
        self.read_back.append(len(names))
        return super().readback(names)


class Trained:
    """A fleet of one engine that was synced once and now fails `times` times."""

    def __init__(self, call="zero", times=1, error=None, **config) -> None:
        self.made = Made(1)
        self.engine = Faulty("engine1", call, 0, error)
        self.made.fleet._seats[0].engine = self.engine
        self.config = SyncConfig(bucket_bytes=64, **config)
        self.session = WeightSync(self.made.fleet, self.config, probe_sequences=[[1, 2, 3], [4, 5]])
        self.lines: list[str] = []
        self.sync()
        self.engine.times = times
        self.engine.calls.clear()
        self.engine.read_back.clear()
        self.session.request_full_readback()

    def sync(self):
        return proved_or_resynced(self.session, Source(), lambda: VALUES, self.config, tell=self.lines.append)


FAULTS = {
    "read-back": ("zero", None, "engine1: 1 of 5 tensors read back differ from the trainer's: t2"),
    "refusal of a bucket": ("load t1", WeightMismatch("engine1: worker 1 of 2: no memory for t1"), "no memory for t1"),
    "refusal of the read-back": ("readback", EngineRefused("engine1: MemoryError: t3"), "engine1: MemoryError: t3"),
    "refusal of the score": ("score", EngineRefused("engine1: HTTP 500: score"), "HTTP 500: score"),
    "another version": ("commit", WeightMismatch("engine1: the engine says '7'"), "the engine says '7'"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_happens_once_is_healed_by_a_complete_sync(name):
    call, error, said = FAULTS[name]
    trained = Trained(call, 1, error, on_failed_proof=RESYNC)
    report = trained.sync()
    assert (report.version, report.readback_tensors, trained.session.resyncs) == (3, 5, 1)
    assert trained.engine.calls.count("begin") == 2 and trained.engine.calls.count("attach") == 1
    assert trained.engine.calls.count("commit") == (2 if call == "commit" else 1)
    assert all(torch.equal(trained.engine.held[tensor], value) for tensor, value in TENSORS.items())
    [line] = trained.lines
    assert line.startswith("weight sync failed: ") and said in line
    assert line.endswith("; a complete one follows (re-sync 1 of at most 2)")
    assert drawn(trained.made.fleet.generate(PROMPTS, SAMPLING)) == expected()


def test_nothing_is_sampled_between_the_two():
    trained = Trained(on_failed_proof=RESYNC)
    refused = []

    def sample(line):
        with pytest.raises(StaleRollout):
            trained.engine.generate(PROMPTS, SAMPLING)
        refused.append(trained.made.fleet.version)

    proved_or_resynced(trained.session, Source(), lambda: VALUES, trained.config, tell=sample)
    assert refused == [None]


@pytest.mark.parametrize("name", FAULTS)
def test_by_default_the_first_failure_is_the_last(name):
    call, error, said = FAULTS[name]
    trained = Trained(call, 1, error)
    with pytest.raises(WeightMismatch) as caught:
        trained.sync()
    assert said in str(caught.value) and "complete" not in str(caught.value)
    assert (trained.session.resyncs, trained.lines, trained.made.fleet.version) == (0, [], None)
    assert trained.engine.calls.count("begin") == 1


def test_a_fault_that_stays_stops_with_both_messages():
    trained = Trained("zero", 9, on_failed_proof=RESYNC)
    once = "engine1: 1 of 5 tensors read back differ from the trainer's: t2"
    with pytest.raises(WeightMismatch) as caught:
        trained.sync()
    assert str(caught.value) == f"{once}; this was the complete sync that followed a failed one: {once}"
    assert (trained.session.resyncs, trained.engine.calls.count("begin"), trained.made.fleet.version) == (1, 2, None)


def test_the_second_try_reads_everything_back_where_the_first_read_a_sample():
    trained = Trained("load t1", 0, WeightMismatch("no"), on_failed_proof=RESYNC)
    trained.session._full_readback, trained.engine.times = False, 1
    assert trained.sync().readback_tensors == 5
    assert trained.engine.read_back == [5]
    assert trained.sync().readback_tensors < 5


def test_resyncs_of_a_run_are_counted_and_spent():
    trained = Trained(on_failed_proof=RESYNC, max_resyncs=1)
    trained.sync()
    trained.engine.times = 1
    trained.session.request_full_readback()
    with pytest.raises(WeightMismatch, match=r"read back differ from the trainer's: t2; sync\.max_resyncs=1 are spent$"):
        trained.sync()
    assert trained.session.resyncs == 1


@pytest.mark.parametrize("error", [EngineDied("engine1 died"), ValueError("odd")])
def test_what_is_no_failed_proof_is_not_synced_again_here(error):
    trained = Trained("load t1", 1, error, on_failed_proof=RESYNC)
    with pytest.raises(type(error), match=str(error)):
        trained.sync()
    assert (trained.session.resyncs, trained.lines) == (0, [])


def test_a_death_in_the_second_try_is_a_death():
    trained = Trained("load t1", 1, WeightMismatch("engine1: no"), on_failed_proof=RESYNC)
    tell = trained.lines.append

    def dies(line):
        tell(line)
        trained.engine.dies_in = "finish"

    with pytest.raises(EngineDied, match="engine1 died during 'finish'"):
        proved_or_resynced(trained.session, Source(), lambda: VALUES, trained.config, tell=dies)
    assert len(trained.lines) == trained.session.resyncs == 1


def test_a_negative_number_of_resyncs_is_refused():
    with pytest.raises(ValueError, match=r"sync\.max_resyncs=-1 must be >= 0"):
        WeightSync(None, SyncConfig(max_resyncs=-1), probe_sequences=[[1, 2]])
