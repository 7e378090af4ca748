"""A stage of two ranks, of which rank 1 fails in the middle of the policy's own collectives: `failing_gather.py FOLDER PLACE`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fleet_stubs import PROBE, TENSORS, VALUES, Engine, Source

from mcore_rl.config.schema import SyncConfig
from mcore_rl.guard import die_with_parent, end_on_sigterm, on_uncaught
from mcore_rl.run_folder import RunFolder
from mcore_rl.sync import ranks
from mcore_rl.sync.session import WeightSync

ranks._FREE_AFTER_S = 1.0
folder, place, rank = RunFolder(Path(sys.argv[1])), sys.argv[2], int(os.environ["RANK"])
die_with_parent()
end_on_sigterm()
on_uncaught(rank, folder.rank_error(rank))
dist.init_process_group("gloo", timeout=timedelta(seconds=300))
own = dist.new_group([0, 1])  # as the policy's: others than the one that errors travel in


def meet(where: str) -> None:
    if rank == 1 and where == place:
        raise MemoryError(f"no memory in {where}")
    dist.all_reduce(torch.zeros(1), group=own)


class Gathering(Source):
    """Every tensor costs a collective."""

    def held_names(self):
        return frozenset(TENSORS) if rank == 0 else frozenset()

    def bucket(self, names):
        for name in names:
            meet(name)
            yield name, TENSORS[name]


def probe():
    meet("probe")
    return VALUES


engine = Engine("stub") if rank == 0 else None
WeightSync(engine, SyncConfig(bucket_bytes=10**6), probe_sequences=PROBE).sync(Gathering(), probe)
dist.barrier()
dist.destroy_process_group()
