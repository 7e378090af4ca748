"""The pool of ranks itself: right layouts, fresh state, failures that name the rank, no process left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankFailure

from parallel.layout import ParallelLayout


def sum_over_tp(groups, device, value):
    tensor = torch.tensor([value * (groups.at.tp + 1)], device=device)
    dist.all_reduce(tensor, group=groups.tp)
    return dist.get_rank(), dist.get_world_size(), tensor


def fail_on_rank_1(groups, device):
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not like this")
    dist.barrier()


def sleep(groups, device, seconds):
    time.sleep(seconds)


def die(groups, device):
    os._exit(3)


def draw(groups, device):
    return torch.rand(2)


def where(groups, device):
    at = groups.at
    return {
        "tp": (dist.get_rank(groups.tp), groups.tp.size(), at.tp),
        "pp": (dist.get_rank(groups.pp), groups.pp.size(), at.pp),
        "dp": (dist.get_rank(groups.dp), groups.dp.size(), at.dp),
        "ep": (dist.get_rank(groups.ep), groups.ep.size(), at.ep),
        "etp": (dist.get_rank(groups.etp), groups.etp.size(), at.etp),
        "edp": (dist.get_rank(groups.edp), groups.edp.size(), at.edp),
    }


LAYOUTS = [
    ParallelLayout(),
    ParallelLayout(world=2, tp=2, sp=True),
    ParallelLayout(world=2, ep=2),
    ParallelLayout(world=4, tp=2, pp=2),
    ParallelLayout(world=4, tp=2, ep=2, sp=True),
    ParallelLayout(world=4, pp=2, ep=2),
    ParallelLayout(world=4, ep=2, etp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_rank_maps_are_megatrons(ranks, layout):
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "ep": layout.ep, "etp": layout.etp, "edp": layout.edp}
    for places in ranks.run(where, layout):
        for axis, (rank, size, ours) in places.items():
            assert (rank, size) == (ours, sizes[axis]), axis


def test_one_two_and_four_ranks_in_turn(ranks):
    for world in (2, 1, 4, 2):
        results = ranks.run(sum_over_tp, ParallelLayout(world=world, tp=world), 1.0)
        total = world * (world + 1) / 2
        assert [(rank, size, tensor.item()) for rank, size, tensor in results] == [(r, world, total) for r in range(world)]


def test_every_run_is_seeded(ranks):
    first, second, other = (ranks.run(draw, ParallelLayout(), seed=seed)[0] for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_failure_names_the_rank_and_the_pool_recovers(ranks):
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of the pool failed.*ValueError: rank 1 does not like this"):
        ranks.run(fail_on_rank_1, ParallelLayout(world=2))
    assert ranks.pids() == []
    assert len(ranks.run(draw, ParallelLayout(world=2))) == 2


def test_deadline_and_death_are_failures(ranks):
    with pytest.raises(RankFailure, match=r"ranks \[0\] did not answer within 0.5 s"):
        ranks.run(sleep, ParallelLayout(), 30, deadline_s=0.5)
    with pytest.raises(RankFailure, match="rank 0 died without an answer"):
        ranks.run(die, ParallelLayout())


PARENT = """
import sys
from rank_pool import RankPool
from parallel.layout import ParallelLayout

def quiet(groups, device):
    return None

if __name__ == "__main__":
    pool = RankPool()
    pool.run(quiet, ParallelLayout(world=2), deadline_s=300)
    print(*pool.pids(), flush=True)
    sys.stdin.read()
"""


def test_ranks_die_with_their_parent(tmp_path):
    root = Path(__file__).parents[2]
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    environment = dict(os.environ, PYTHONPATH=f"{root}:{root / 'tests' / 'support'}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    parent = subprocess.Popen([sys.executable, str(program)], env=environment, **pipes)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert all(Path(f"/proc/{pid}").exists() for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.1)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
