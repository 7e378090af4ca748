"""`mcore-rl train` on the small dense and hybrid models, and what must hold of every step of it."""

from __future__ import annotations

import json
from pathlib import Path

from cli_runs import CliRun, start_run

OPTIONS = {
    "tiny_dense": ("sft.aux_loss_coef=0",),
    "tiny_hybrid": (),
}


def trained(folder: Path, model: str, layout: str, steps: int) -> CliRun:
    """A finished run; fails with the end of its error output when it did not complete."""
    run = start_run(folder, f"{model}_{layout}", f"model={model}", f"layout={layout}", *OPTIONS[model], f"train.steps={steps}")
    code, _, err = run.finish(600.0)
    assert code == 0, err[-3000:]
    summary = run.summary()
    assert (summary["exit_reason"], summary["steps"]) == ("completed", steps)
    return run


def check_steps(run: CliRun, steps: int) -> None:
    """Every tensor read back at every sync; trainer and engine at most twice as far apart as at the no-op sync.

    In float32 that is the last bits of a log-prob, which grow with it: there 1e-5 nats are allowed.
    """
    rows = run.rows()
    assert len(rows) == steps
    for row in rows:
        floor = row["sync/floor_mean_nats"]
        assert row["sync/readback_tensors"] == row["sync/tensors"]
        assert 0.0 < floor < 0.05
        for name in ("sync/probe_mean_nats", "delta_mean_abs_nats"):
            assert row[name] <= max(2 * floor, 1e-5), (name, row[name], floor)
    records = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {record["weight_version"] for record in records} == {2 * step for step in range(steps)}
