"""The report, from a synthetic run folder: files, content, and what it says about what is not there."""

import base64
import json
import math
import random
import re
import struct

import pytest

from mcore_rl.config.compose import compose_config
from mcore_rl.manifest import RunFacts, build_manifest, write_manifest
from mcore_rl.report import PLOTS, write_report
from mcore_rl.report_data import load_run
from mcore_rl.report_html import number
from mcore_rl.report_plots import wilson
from mcore_rl.run_folder import RunFolder
from mcore_rl.summary import COMPLETED, EvalSummary, build_summary, summarise_failure, write_summary
from mcore_rl.telemetry.jsonl_sink import JsonlSink

LAYERS, EXPERTS, STEPS = 4, 8, 20


def step_row(step: int) -> dict[str, float | list[float]]:
    rng = random.Random(step)
    done = step / STEPS
    row: dict[str, float | list[float]] = {
        "reward_mean": 0.3 + 0.5 * done + rng.gauss(0, 0.02),
        "accuracy": 0.3 + 0.5 * done + rng.gauss(0, 0.02),
        "zero_var_frac": 0.05 + 0.3 * done,
        "all_wrong_frac": 0.04,
        "all_right_frac": 0.01 + 0.3 * done,
        "format_frac": 0.99,
        "extract_frac": 0.98,
        "resp_trunc_frac": 0.01,
        "resp_len_mean_tokens": 10 + 6 * done,
        "delta_mean_abs_nats": 2e-6 * (1 + 0.2 * rng.random()),
        "delta_p99_nats": 1e-5,
        "delta_max_abs_nats": 6e-5 * (1 + rng.random()),
        "policy_entropy_nats": 0.32 - 0.15 * done,
        "lr": min(1.0, (step + 1) / 2) * 1e-4,
        "sync/probe_max_nats": 1e-5 * (1 + rng.random()),
        "tokens_per_correct": math.inf if step == 0 else 30.0,
    }
    row |= {
        f"seconds/{stage}": s * (1 + 0.2 * rng.random())
        for stage, s in {"rollout": 1.2, "old": 0.6, "update": 2.0, "sync": 0.4}.items()
    }
    for update in range(2):
        clipped = 0.0 if update == 0 else 0.5 + 0.1 * rng.random()
        row |= {f"clip_frac/update_{update}": clipped, f"grad_norm/update_{update}": 0.4 + 0.2 * rng.random()}
        row |= {f"ratio_min/update_{update}": 1 - 4e-3 * update, f"ratio_max/update_{update}": 1 + 5e-3 * update}
    for layer in range(LAYERS):
        row[f"router_entropy_nats/layer_{layer}"] = 1.55 + 0.08 * layer - 0.04 * done
        load = [100.0 + 60 * rng.random() + (80 * done if expert == layer else 0) for expert in range(EXPERTS)]
        row[f"expert_load/layer_{layer}"] = load
        row[f"load_max_over_mean/layer_{layer}"] = max(load) / (sum(load) / EXPERTS)
    return row


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "synthetic")
    sink = JsonlSink(folder.root)
    for step in range(STEPS):
        sink.log_step(step, step_row(step))
    sink.close()
    evals = EvalSummary(0.195, 0.89, 0.027, 0.66, 0.328, 0.72, 500)
    write_summary(folder, build_summary(load_run(folder).rows, evals, exit_reason=COMPLETED))
    facts = RunFacts("t" * 64, "c" * 64, "m" * 64, {"optimizer": "torch Adam", "norm": "torch"}, "1")
    write_manifest(folder, build_manifest(compose_config(["experiment=quickstart"]), facts, launch={"command": "mcore-rl train"}))
    write_report(folder)
    return folder


def png_size(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


def test_every_picture_is_drawn_and_embedded(run):
    page = run.report.read_text()
    for plot in PLOTS:
        width, height = png_size(run.plots / f"{plot.name}.png")
        assert width > 900
        assert height > 300
        assert base64.b64encode((run.plots / f"{plot.name}.png").read_bytes()).decode() in page
        assert plot.title in page
    assert "<h2>Missing</h2>" not in page


def test_the_page_is_self_contained_and_says_the_numbers(run):
    page = run.report.read_text()
    assert not re.findall(r"(?:src|href)=\"(?!data:)", page)
    assert "<script" not in page
    assert "0.195 &rarr; 0.890" in page
    assert "+66.0 points" in page
    assert "mcore-rl train" in page
    assert "torch Adam" in page
    assert "completed" in page


def test_a_distillation_shows_its_teacher_and_no_clip(tmp_path):
    folder = RunFolder(tmp_path / "distilled")
    sink = JsonlSink(folder.root)
    for step in range(2):
        sink.log_step(step, {"teacher_kl_nats/update_0": 0.2 - 0.1 * step, "mass_outside_teacher_k/update_0": 1e-3})
    sink.close()
    write_summary(folder, build_summary(load_run(folder).rows, EvalSummary(), exit_reason="completed"))
    page = write_report(folder).read_text()
    assert {path.stem for path in folder.plots.iterdir()} == {"teacher"}
    assert "Distillation" in page and "clip_frac" not in page


def test_missing_series_are_named_and_the_rest_is_drawn(tmp_path):
    folder = RunFolder(tmp_path / "thin")
    sink = JsonlSink(folder.root)
    sink.log_step(0, {"reward_mean": 0.5, "router_entropy_nats/layer_3": 1.2})
    sink.log_step(1, {"reward_mean": math.nan, "router_entropy_nats/layer_3": 1.1})
    sink.close()
    write_summary(folder, build_summary(load_run(folder).rows, EvalSummary(), exit_reason="EngineDied: engine <0> died"))
    page = write_report(folder).read_text()
    assert {path.stem for path in folder.plots.iterdir()} == {"reward", "router_entropy"}
    missing = page.split("<h2>Missing</h2>")[1].split("</p>")[0]
    for name in (
        "delta_mean_abs_nats",
        "clip_frac/*",
        "expert_load/layer_*",
        "summary.accuracy_before",
        "manifest.json",
        "seconds/*",
    ):
        assert f"<code>{name}</code>" in missing
    assert "reward_mean" not in missing
    assert "EngineDied: engine &lt;0&gt; died" in page


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no run folder at"):
        write_report(RunFolder(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="not a run folder"):
        write_report(RunFolder(tmp_path))
    (tmp_path / "summary.json").write_text("{broken")
    with pytest.raises(ValueError, match=r"summary\.json: not JSON"):
        write_report(RunFolder(tmp_path))


def test_wilson_interval_of_known_values():
    """195 of 1000: Wilson's interval by hand, (p + z2/2n -+ z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n)."""
    low, high = wilson(0.195, 1000)
    assert low == pytest.approx(0.17164, abs=5e-5)
    assert high == pytest.approx(0.22069, abs=5e-5)
    assert wilson(0.0, 10)[0] == pytest.approx(0.0, abs=1e-12)


def test_numbers_for_people():
    assert [number(v) for v in (0.12345, 2e-6, 0.0, 7, None, math.nan)] == ["0.123", "2.0e-06", "0.0", "7", "-", "nan"]


def test_summary_quarters_and_gaps(run):
    summary = json.loads(run.summary.read_text())
    rows = load_run(run).rows
    first = sum(row["delta_mean_abs_nats"] for row in rows[:5]) / 5
    assert summary["delta_mean_abs_first_quarter_nats"] == pytest.approx(first)
    assert summary["delta_max_abs_nats"] == max(row["delta_max_abs_nats"] for row in rows)
    assert summary["steps"] == STEPS
    assert set(summary["seconds_by_stage"]) == {"rollout", "old", "update", "sync"}
    empty = build_summary([], EvalSummary(), exit_reason="x")
    assert empty["delta_max_abs_nats"] is None
    assert empty["accuracy_after"] is None


def test_a_failed_run_has_a_summary_with_the_launcher_s_verdict(tmp_path):
    folder = RunFolder(tmp_path / "failed")
    sink = JsonlSink(folder.root)
    sink.log_step(0, {"delta_mean_abs_nats": 2e-6, "delta_max_abs_nats": math.nan, "seconds/rollout": 1.5})
    sink.close()
    summarise_failure(folder, "rank 1 was killed by SIGKILL")
    summary = json.loads(folder.summary.read_text())
    assert summary["exit_reason"] == "rank 1 was killed by SIGKILL"
    assert (summary["steps"], summary["seconds_by_stage"]) == (1, {"rollout": 1.5})
    assert summary["delta_max_abs_nats"] == "NaN"
    summarise_failure(folder, "stopped by SIGINT")
    summary = json.loads(folder.summary.read_text())
    assert summary["exit_reason"] == "stopped by SIGINT"
    assert summary["exit_reason_rank0"] == "rank 1 was killed by SIGKILL"
