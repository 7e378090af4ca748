"""What a run does about a failed proof and about a list of addresses it cannot use, on every rank alike. Engines are stubs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from fleet_stubs import PROBE, TENSORS, VALUES, Made, Servers, Source

from mcore_rl.config.schema import OnFailedProof, RunConfig, SyncConfig
from mcore_rl.engine_calls import engine_metrics, proved_sync
from mcore_rl.ranks import run_ranks
from mcore_rl.run_folder import RunFolder
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import WeightMismatch
from parallel.layout import ParallelLayout

ROOT = str(Path(__file__).parents[2])


class Half(Source):
    """Rank 1 holds every other tensor, and hands t3 out in another shape as long as there are faults left."""

    def __init__(self, faults: int) -> None:
        self.faults = faults if dist.get_rank() == 1 else 0

    def held_names(self):
        return frozenset(name for at, name in enumerate(TENSORS) if at % 2 == dist.get_rank())

    def bucket(self, names):
        dist.barrier()
        for name in names:
            wrong = name == "t3" and self.faults > 0
            self.faults -= wrong
            yield name, TENSORS[name].t() if wrong else TENSORS[name]


def run_of(fleet, session, source, policy=OnFailedProof.stop):
    """As much of a run as a sync needs, and the lines it says."""
    config, lines = RunConfig(), []
    config.sync.on_failed_proof = policy
    values = SimpleNamespace(logprobs=[torch.tensor([0.0, *row]) for row in VALUES])
    trainer = SimpleNamespace(weights=lambda: source, logprobs=lambda probe, kind: values)
    parts = {"config": config, "policy": trainer, "weight_sync": session, "fleet": fleet, "own_sampler": None, "probe": None}
    return SimpleNamespace(**parts, progress=SimpleNamespace(line=lines.append)), lines


def outcome(run):
    """Version, or kind and message."""
    try:
        return proved_sync(run).version
    except (WeightMismatch, ValueError) as failure:
        return type(failure).__name__, str(failure)


def failing(groups, device, where, times, policy):
    """Every rank's outcome, re-syncs and lines; rank 0's engine version, and whether it holds what was sent."""
    fleet = Made(1).fleet if dist.get_rank() == 0 else None
    source = Half(times if where == "source" else 0)
    if fleet is not None and where == "engine":
        engine, left = fleet.members[0], [times]
        load = engine.load

        def zeroing(slot, tensors):
            load(slot, tensors)
            if tensors[0][0] == "t2" and left[0]:
                left[0] -= 1
                engine.held["t2"] = torch.zeros(3, 8)

        engine.load = zeroing
    session = WeightSync(fleet, SyncConfig(bucket_bytes=64), probe_sequences=PROBE)
    run, lines = run_of(fleet, session, source, OnFailedProof(policy))
    ended = outcome(run)
    if fleet is None:
        return ended, session.resyncs, lines, None
    held = fleet.members[0].held
    equal = set(held) == set(TENSORS) and all(torch.equal(held[name], value) for name, value in TENSORS.items())
    return ended, session.resyncs, lines, (fleet.version, equal, engine_metrics(run)["sync/resyncs"])


FAULTS = {"engine": "engine0.0: 1 of 5 tensors read back differ from the trainer's: t2", "source": "t3 came as [8, 4]"}


@pytest.mark.parametrize("where", FAULTS)
def test_every_rank_syncs_again(ranks, where):
    first, second = ranks.run(failing, ParallelLayout(world=2), where, 1, "resync")
    assert first[0] == second[0] == 3
    assert first[1] == second[1] == 1
    assert first[3] == (3, True, 1.0)
    assert FAULTS[where] in first[2][0] and first[2][0].endswith("a complete one follows (re-sync 1 of at most 2)")


@pytest.mark.parametrize("where", FAULTS)
def test_every_rank_stops_after_the_second_failure(ranks, where):
    for ended, resyncs, lines, _ in ranks.run(failing, ParallelLayout(world=2), where, 9, "resync"):
        assert ended[0] == "WeightMismatch" and ended[1].count(FAULTS[where]) == 2
        assert (resyncs, len(lines)) == (1, 1)


@pytest.mark.parametrize("where", FAULTS)
def test_every_rank_stops_at_once_by_default(ranks, where):
    for ended, resyncs, lines, _ in ranks.run(failing, ParallelLayout(world=2), where, 1, "stop"):
        assert ended[0] == "WeightMismatch" and ended[1].count(FAULTS[where]) == 1
        assert (resyncs, lines) == (0, [])


def mistyped(groups, device, folder):
    """Tensors read back and lines of three syncs: a wrong line appears before the second; the engines it leaves as they are."""
    servers = Servers(Path(folder), "http://127.0.0.1:1", "http://127.0.0.1:2")
    run, lines = run_of(servers.fleet, servers.sync, Source())
    found = [(proved_sync(run).readback_tensors, list(lines))]
    attached = [engine.segment for engine in servers.made]
    servers.write("http://127.0.0.1:1", "http//127.0.0.1:2")
    found += [(proved_sync(run).readback_tensors, list(lines)) for _ in range(2)]
    return found, attached == [engine.segment for engine in servers.made], servers.names()


def test_a_wrong_line_of_the_file_is_said_once_and_reads_nothing_back(ranks, tmp_path):
    [(found, same, names)] = ranks.run(mistyped, ParallelLayout(world=1), str(tmp_path))
    assert [count < 5 for count, _ in found] == [True] * 3  # of 5 tensors, one sync in ten reads each
    assert same and names == ["http://127.0.0.1:1", "http://127.0.0.1:2"]
    assert [len(lines) for _, lines in found] == [0, 1, 1]
    assert "servers.txt:3: http//127.0.0.1:2: an address like" in found[1][1][0]


STAGE = Path(__file__).parents[1] / "support" / "failing_gather.py"


def launched(folder, place):
    """How the launcher's two ranks end, and after how many seconds."""
    started = time.monotonic()
    ended = run_ranks([sys.executable, str(STAGE), str(folder), place], world=2, folder=RunFolder(folder), env={"PYTHONPATH": ROOT})
    return ended, time.monotonic() - started


@pytest.mark.parametrize("place", ["t2", "probe"])
def test_a_rank_that_fails_in_the_policys_own_collectives_frees_the_others(tmp_path, place):
    """They wait in one, where no error of another rank can reach them; the group's time-out is 300 s."""
    ended, seconds = launched(tmp_path, place)
    assert ended.exit_code == 1
    assert ended.message.startswith(f"no memory in {place} [MemoryError, rank 1]; traceback: ")
    assert seconds < 60


def test_the_same_ranks_end_well_where_none_fails(tmp_path):
    ended, _ = launched(tmp_path, "nowhere")
    assert ended.exit_code == 0, ended.message
