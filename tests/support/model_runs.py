"""`mcore-rl train` on the small dense and hybrid models, and what must hold of every step of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from cli_runs import SMALL, CliRun, start_run

OPTIONS = {
    "tiny_dense": ("sft.aux_loss_coef=0",),
    "tiny_hybrid": (),
}
# The quickstart as it is, warm-up and batches of 256; the held-out looks are shorter, and the floor's estimate is of more tokens.
WHOLE = (
    "experiment=quickstart",
    "eval.prompts=100",
    "telemetry.wandb=disabled",
    "sync.readback_every=1",
    "sync.probe_sequences=16",
)


def trained(folder: Path, model: str, layout: str, steps: int, base: Sequence[str] = SMALL) -> CliRun:
    """A finished run; fails with the end of its error output when it did not complete."""
    overrides = (f"model={model}", f"layout={layout}", *OPTIONS[model], f"train.steps={steps}")
    run = start_run(folder, f"{model}_{layout}", *overrides, base=base)
    code, _, err = run.finish(600.0)
    assert code == 0, err[-3000:]
    summary = run.summary()
    assert (summary["exit_reason"], summary["steps"]) == ("completed", steps)
    return run


def check_steps(run: CliRun, steps: int) -> None:
    """Every tensor read back at every sync; trainer and engine at most twice as far apart as at the no-op sync.

    The probe and the sampled tokens against the probe of the sync that training begins with; the sampled tokens also against
    those sampled right after it. In float32 that is the last bits of a log-prob, which grow with it: there 1e-5 are allowed.
    """
    rows = run.rows()
    assert len(rows) == steps
    floor, sampled = rows[0]["sync/floor_mean_nats"], rows[0]["delta_mean_abs_nats"]
    assert 0.0 < floor < 0.05
    for row in rows:
        assert row["sync/readback_tensors"] == row["sync/tensors"]
        assert row["sync/floor_mean_nats"] == floor
        for name, least in (("sync/probe_mean_nats", floor), ("delta_mean_abs_nats", min(floor, sampled))):
            assert row[name] <= max(2 * least, 1e-5), (name, row[name], least)
    records = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    assert {record["weight_version"] for record in records} == {2 * step for step in range(steps)}
