"""What trainer ranks do when they sync a real engine: load a checkpoint into live modules, send it, prove it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from policy_ranks import make_policy
from remote_endpoint import RemoteEndpoint

from mcore_rl.config.schema import SyncConfig
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import Pass, TokenBatch
from models.weights import load_hf_weights


def sync_each(groups, device, address, folders, probe, config):
    """Sync the weights of every folder in turn, all through one policy and one session; returns the reports."""
    engine = RemoteEndpoint(address) if dist.get_rank() == 0 else None
    policy = make_policy(groups, Path(folders[0]), tokens_per_micro_batch=256)
    session = WeightSync(engine, SyncConfig(**config), probe_sequences=probe)
    ids = tuple(torch.tensor(row) for row in probe)
    masks = tuple(torch.arange(len(row)) > 0 for row in probe)
    batch = TokenBatch(ids, masks, tuple(str(row) for row in range(len(probe))))

    def logprobs():
        return [row[1:].tolist() for row in policy.logprobs(batch, Pass.PROBE).logprobs]

    reports = []
    for folder in folders:
        load_hf_weights([chunk.module for chunk in policy._chunks], policy._spec, groups, Path(folder))
        session.request_full_readback()
        reports.append(asdict(session.sync(policy.weights(), logprobs)))
    return reports
