"""`mcore-rl distill` with real ranks, a real student engine and a real teacher engine."""

import os
import signal

import psutil
import pytest
from cli_runs import start_run, wait_for

from mcore_rl.config.compose import compose_config
from mcore_rl.tiny_model import build_tiny

SMALL = ("rollout.max_tokens=6", "eval.prompts=4", "eval.temperature_1=false", "distill.gate_prompts=8", "distill.top_k=16")


def teacher(folder, seed):
    """The quickstart's model; with seed 0 it is, bit for bit, the student of a run with seed=0."""
    return build_tiny(folder / f"teacher{seed}", compose_config(["experiment=quickstart"]).model.build, seed)


def test_a_student_that_is_its_own_teacher(tmp_path):
    """Nothing to learn at first: the engine's and the trainer's log-probs of the same weights are all that is between them."""
    options = (
        "train.steps=2",
        "algorithm.aggregation=token_mean",
        "distill.min_lead=0",
        f"distill.teacher={teacher(tmp_path, 0)}",
    )
    run = start_run(tmp_path, "own", *SMALL, *options, "train.steps=2", stage="distill")
    code, _, err = run.finish(300.0)
    assert code == 0, err[-2000:]
    rows, summary = run.rows(), run.summary()
    assert [row["version"] for row in rows] == [2, 4]
    assert abs(rows[0]["teacher_kl_nats/update_0"]) <= 1e-5
    # Adam makes steps of rounding noise too: then there is a divergence, and it is the loss.
    assert rows[1]["teacher_kl_nats/update_0"] > 1e-3
    for row in rows:
        for update in (0, 1):
            assert row[f"loss/update_{update}"] == pytest.approx(row[f"teacher_kl_nats/update_{update}"], abs=1e-5)
            assert 0.0 < row[f"mass_outside_teacher_k/update_{update}"] < 1.0
    gate = summary["teacher_gate"]
    assert (gate["prompts"], gate["teacher_accuracy"]) == (8, gate["student_accuracy"])
    assert summary["export_check"]["matched"] == summary["export_check"]["prompts"] > 0
    assert run.leftovers() == []


def test_a_teacher_that_is_not_ahead(tmp_path):
    run = start_run(tmp_path, "gate", *SMALL, f"distill.teacher={teacher(tmp_path, 1)}", stage="distill")
    code, _, err = run.finish(300.0)
    assert code != 0
    assert "distill.min_lead=0.05" in err and "a teacher that is ahead by that much is needed" in err
    assert run.rows() == [] and run.leftovers() == []


def test_a_quantised_teacher_is_compared_with_the_full_one(tmp_path):
    """Another random model is no copy of it."""
    full = teacher(tmp_path, 2)
    options = ("distill.min_lead=-1", f"distill.teacher={teacher(tmp_path, 1)}", f"distill.full_teacher={full}")
    run = start_run(tmp_path, "full", *SMALL, *options, "distill.gate_max_kl_nats=0", stage="distill")
    code, _, err = run.finish(300.0)
    assert code != 0
    assert "distill.gate_max_kl_nats=0.0" in err and str(full) in err
    assert run.leftovers() == []


def test_the_teacher_dies(tmp_path):
    folder = teacher(tmp_path, 1)
    run = start_run(
        tmp_path, "dies", *SMALL, "train.steps=500", "distill.min_lead=-1", f"distill.teacher={folder}", stage="distill"
    )
    wait_for(lambda: len(run.rows()) >= 1, 240.0, "the first step")
    found = [p for p in psutil.process_iter(["cmdline"]) if "mcore_rl.rollout.vllm_child" in (p.info["cmdline"] or [])]
    [victim] = [p for p in found if str(folder) in p.info["cmdline"][-1]]
    os.kill(victim.pid, signal.SIGKILL)
    code, _, err = run.finish(60.0)
    assert code != 0
    assert "teacher.log" in err and "killed by SIGKILL" in err
    assert run.leftovers() == []
