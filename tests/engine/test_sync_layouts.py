"""Megatron trainers of every layout against real engines: W2, then W1, and the engine is what it was when it started on W1."""

from __future__ import annotations

import hf_trainer
import pytest
from remote_endpoint import EndpointServer
from sync_ranks import sync_each

from parallel.layout import ParallelLayout

LAYOUTS = {
    "tp2": ParallelLayout(world=2, tp=2, sp=True),
    "pp2": ParallelLayout(world=2, pp=2),
    "ep2": ParallelLayout(world=2, ep=2),
    "tp2ep2": ParallelLayout(world=4, tp=2, ep=2, sp=True),
}


def folder_of(trained, which):
    """Model `which` as a checkpoint; written once."""
    path = trained.link.log_path.parent / f"trainer_{which}"
    return path if path.exists() else hf_trainer.save(trained.models[which], path)


def there_and_back(ranks, trained, layout, bucket_bytes):
    server = EndpointServer(trained.engine)
    config = {"bucket_bytes": bucket_bytes, "probe_max_nats": trained.probe_max_nats}
    folders = [str(folder_of(trained, which)) for which in "bab"]
    try:
        everyone = ranks.run(sync_each, layout, server.address, folders[:2], trained.probe, config)
        assert trained.engine.score(trained.probe) == trained.fresh
        again = ranks.run(sync_each, layout, server.address, folders[2:], trained.probe, config)
    finally:
        server.close()
    tensors = len(trained.source("a").tensors)
    for reports in everyone:
        assert [report["readback_tensors"] for report in reports] == [tensors] * 2
        assert all(report["buckets"] >= 4 for report in reports)
    assert again[0][0]["probe_max_nats"] == everyone[0][0]["probe_max_nats"]
    moved = trained.engine.score(trained.probe)
    assert max(abs(x - y) for rows in zip(moved, trained.fresh, strict=True) for x, y in zip(*rows, strict=True)) > 0.2


@pytest.mark.parametrize("layout", ["tp2", "ep2", "pp2", "tp2ep2"])
def test_mixture_of_experts(ranks, moe, layout):
    there_and_back(ranks, moe, LAYOUTS[layout], 100_000)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_dense_with_a_tied_head(ranks, dense, layout):
    there_and_back(ranks, dense, LAYOUTS[layout], 100_000)


@pytest.mark.parametrize("layout", ["tp2", "ep2", "pp2", "tp2ep2"])
def test_hybrid_in_bfloat16(ranks, hybrid, layout):
    there_and_back(ranks, hybrid, LAYOUTS[layout], 200_000)
