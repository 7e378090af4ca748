"""`mcore-rl train` with an engine of its own: two real ranks, one real vLLM, killed where it hurts."""

import json
import signal
import time

import pytest
from cli_runs import (
    CACHE_RESET,
    FINISHED_LOADING,
    descendants,
    engine_process,
    kill,
    start_run,
    wait_for,
    wait_for_line,
    wait_for_rows,
)

LIMIT_S = 60.0
ENDLESS = "train.steps=100000"
MORTAL = "rollout.max_engine_restarts=0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A complete run of two steps."""
    run = start_run(tmp_path_factory.mktemp("owned"), "two_steps", "train.steps=2")
    code, out, err = run.finish(300.0)
    assert code == 0, err[-2000:]
    return run, out


def test_two_steps_end_to_end(trained):
    run, out = trained
    summary, rows = run.summary(), run.rows()
    assert summary["exit_reason"] == "completed"
    assert summary["steps"] == len(rows) == 2
    assert [row["version"] for row in rows] == [2, 4]  # two optimizer updates a batch
    assert summary["export_check"]["matched"] == summary["export_check"]["prompts"] > 0
    for name in ("report.html", "manifest.json", "summary.json", "checkpoint/config.json"):
        assert (run.folder / name).exists(), name
        assert name.split("/")[0] in out
    manifest = json.loads((run.folder / "manifest.json").read_text())
    assert "torch" in manifest["implementations"]["optimizer"].lower()


def test_trainer_and_engine_agree(trained):
    run, _ = trained
    for row in run.rows():
        assert row["delta_mean_abs_nats"] <= 1e-5
        assert row["delta_max_abs_nats"] <= 1e-3
        assert row["sync/readback_tensors"] == row["sync/tensors"]  # readback_every=1 reads everything back


def test_trained_ids_are_the_sampled_ids(trained):
    run, _ = trained
    records = [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]
    assert len(records) == 2 * 4 * 2
    assert {record["weight_version"] for record in records} == {0, 2}
    for record in records:
        assert len(record["token_ids"]) == len(record["sampler_logprobs"]) > 0
        assert record["group_id"] == record["sample_id"].rsplit("/", 1)[0]


def test_killed_engine_in_generation(tmp_path):
    long = ("rollout.max_tokens=100", "train.prompts_per_step=64")  # seconds of generation, on a fast machine too
    run = start_run(tmp_path, "generation", ENDLESS, MORTAL, *long)
    wait_for_rows(run, 1)
    wait_for_line(run.folder / "logs" / "engine0.log", CACHE_RESET)
    time.sleep(0.5)  # the probe is scored and the version set within milliseconds; then generation begins
    _ends_well(run, "generate")


def test_killed_engine_in_a_sync(tmp_path):
    run = start_run(tmp_path, "sync", ENDLESS, MORTAL, "rollout.max_tokens=2")
    wait_for_rows(run, 1)
    wait_for_line(run.folder / "logs" / "engine0.log", FINISHED_LOADING)
    _ends_well(run, None)


def _ends_well(run, operation):
    kill(engine_process(run))
    started = time.monotonic()
    code, _, err = run.finish(LIMIT_S)
    assert code != 0
    last = err.strip().splitlines()[-1]
    assert "engine0.log" in last and "SIGKILL" in last and "died" in last, err[-1500:]
    assert "Traceback" not in err
    if operation is not None:
        assert f"'{operation}'" in last
    assert run.leftovers() == []
    assert "died" in run.summary()["exit_reason"]
    assert time.monotonic() - started < LIMIT_S


def test_ctrl_c(tmp_path):
    run = start_run(tmp_path, "interrupted", ENDLESS)
    wait_for_rows(run, 1)
    family = descendants(run.process.pid)
    run.process.send_signal(signal.SIGINT)
    code, _, err = run.finish(LIMIT_S)
    assert code != 0
    assert "Traceback" not in err
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 5.0, "every process to end")
    assert run.leftovers() == []
