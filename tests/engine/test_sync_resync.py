"""Faults that happen in one sync and not in the next, into a real engine whose run may sync again: healed, exact, counted."""

from __future__ import annotations

import pytest
from sync_breakage import EXPERT, NORM, answer, engine, flip, less, nothing, rpc, wire

from mcore_rl.config.schema import OnFailedProof, SyncConfig
from mcore_rl.sync.resync import proved_or_resynced
from mcore_rl.types import Prompt, SamplingParams, StaleRollout, WeightMismatch

RESYNC = SyncConfig(on_failed_proof=OnFailedProof.resync)
SAMPLING = SamplingParams(temperature=1.0, max_tokens=4, stop_token_ids=(), samples_per_prompt=2, seed=1)
PROMPT = Prompt("p", tuple(range(3, 25)), "", "")
FAULTS = {
    "bit flipped in shared memory": ("damaged on the way", flip),
    "third bucket dropped": ("tensors never arrived", wire("update", nothing, at=2)),
    "last tensor of each bucket dropped": ("tensors never arrived", wire("update", less)),
    "loader flips a bit of a norm": (f"1 of 69 tensors read back differ from the trainer's: {NORM}", engine("nudge", NORM)),
    "loader skips an expert": ("the loader took", engine("drop", EXPERT % 5)),
    "no memory": (f"MemoryError: no memory for {EXPERT % 5}", engine("memory", EXPERT % 5)),
    "read-back refused": ("KeyError: no such", rpc("mcore_readback", lambda found: {"mcore_refused": "KeyError: no such"})),
    "prefix cache not reset": ("the prefix cache was not emptied", answer("reset_prefix_cache", lambda call, args: False)),
    "another version": ("the engine says '7'", answer("get_version", lambda call, args: "7")),
}


def attempt(trained, said, *, heal):
    """Sync `b`; `heal` is called, and sampling tried, when the first failure is told."""

    def tell(line):
        said.append(line)
        with pytest.raises(StaleRollout):
            trained.engine.generate([PROMPT], SAMPLING)
        heal()

    source = trained.source("b", 1)
    return proved_or_resynced(trained.session, source, lambda: trained.trainer_logprobs("b"), RESYNC, tell=tell)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_sync_is_healed_by_the_next(moe, monkeypatch, name):
    message, inject = FAULTS[name]
    moe.sync("b", 1)
    calm = moe.engine.generate([PROMPT], SAMPLING)
    moe.sync("a", 0)
    moe.session.request_full_readback()
    inject(moe, monkeypatch)
    said = []
    report = attempt(moe, said, heal=lambda: (monkeypatch.undo(), moe.heal()))
    assert (report.version, moe.engine.version, moe.session.resyncs) == (1, 1, 1)
    assert report.readback_tensors == report.tensors
    assert report.probe_max_nats < 1e-5
    [line] = said
    assert line.startswith(f"weight sync failed: {moe.engine.name}: ") and message in line
    again = moe.engine.generate([PROMPT], SAMPLING)
    assert [(c.token_ids, c.logprobs, c.version) for c in again] == [(c.token_ids, c.logprobs, c.version) for c in calm]


@pytest.mark.parametrize("name", ["bit flipped in shared memory", "loader flips a bit of a norm", "no memory"])
def test_a_fault_that_stays_ends_with_both_failures(moe, monkeypatch, name):
    message, inject = FAULTS[name]
    moe.sync("a", 0)
    moe.session.request_full_readback()
    inject(moe, monkeypatch)
    said = []
    with pytest.raises(WeightMismatch, match="this was the complete sync that followed a failed one: ") as caught:
        attempt(moe, said, heal=lambda: None)
    assert str(caught.value).count(message) == 2 and str(caught.value).count(moe.engine.name) == 2
    assert (len(said), moe.session.resyncs, moe.engine.version) == (1, 1, None)
    with pytest.raises(StaleRollout):
        moe.engine.generate([PROMPT], SAMPLING)
