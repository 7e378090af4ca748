"""`mcore-rl probe` and training on its band, with a reward function that sometimes hangs: real ranks, real vLLM."""

import json
import os
import re
from pathlib import Path

import pytest
from cli_runs import start_run

SUPPORT = Path(__file__).resolve().parents[1] / "support"
# The verdict is the function's: an untrained model is never right at arithmetic.
REWARD = (
    "reward.function=reward_functions:parity",
    "reward.timeout_s=0.3",
    "reward.max_failed_frac=0.75",
    "rollout.max_tokens=6",
)
FAST = ("layout=single", "eval.prompts=4", "eval.temperature_1=false", "eval.export_check_prompts=0")
PROBE = ("data_gate.prompts=12", "data_gate.samples_per_prompt=4", "data_gate.prompts_per_request=8")


def finished(run):
    code, out, err = run.finish(280.0)
    assert code == 0, err[-2000:]
    assert run.leftovers() == []
    return out


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def probed(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]))
        folder = tmp_path_factory.mktemp("gate")
        probe = start_run(folder, "probe", *REWARD, *PROBE, stage="probe")
        out = finished(probe)
        band = probe.folder / "band.jsonl"
        train = start_run(folder, "train", *REWARD, *FAST, f"task.band_file={band}", "train.steps=2")
        finished(train)
        yield probe, out, train


def test_the_probe_counts_verdicts_and_writes_its_files(probed):
    probe, out, _ = probed
    head, *found = rows(probe.folder / "probe.jsonl")
    assert [row["prompt_id"] for row in found] == [f"probe-p{i}" for i in range(12)]
    assert all(row["samples"] == 4 for row in found)
    summary = json.loads((probe.folder / "probe.json").read_text())
    assert summary["correct_histogram"] == [sum(row["correct"] == k for row in found) for k in range(5)]
    assert summary["mixed"] == sum(0 < row["correct"] < 4 for row in found) > 0
    assert summary["kill_reason"] is None
    band_head, *band = rows(probe.folder / "band.jsonl")
    assert [row["question"] for row in band] == [row["question"] for row in found if 1 <= row["correct"] <= 3]
    assert band_head["conditions"] == head["conditions"]
    assert "launch rule: passes" in out
    audited = rows(probe.folder / "audit.jsonl")
    assert len(audited) == 12 * 4
    assert {row["phase"] for row in audited} == {"probe"}
    hung = sum(row["reward_failure"] == "timeout" for row in audited)
    assert summary["reward_failures"] == hung > 0  # one text in nine hangs, and 48 were judged


def test_training_draws_from_the_band_alone(probed):
    probe, _, train = probed
    band = {row["question"] for row in rows(probe.folder / "band.jsonl")[1:]}
    trained = {row["question"] for row in rows(train.folder / "rollouts.jsonl")}
    assert trained and trained <= band
    manifest = json.loads((train.folder / "manifest.json").read_text())
    assert manifest["data"]["band"]["rows"] == len(band)
    assert re.fullmatch(r"1/goal/reward_functions:parity#[0-9a-f]{12} boxed/full/v1", manifest["reward_version"])


def test_training_counts_what_it_dropped_and_audits_it(probed):
    _, _, train = probed
    steps = train.rows()
    assert len(steps) == 2
    assert train.summary()["exit_reason"] == "completed"
    records = rows(train.folder / "rollouts.jsonl")
    failed = [record for record in records if record["reward_failure"] is not None]
    assert sum(step["drop/reward_timeout"] for step in steps) == len(failed)
    assert all(record["reward"] == "NaN" and record["advantage"] == 0.0 for record in failed)
    audited = [row for row in rows(train.folder / "audit.jsonl") if row["phase"] == "train"]
    assert len(audited) == len(records)
    assert {row["step"] for row in audited} == {0, 1}
