"""tools/gpu_check.py runs here in small: the same parts and comparisons, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def gpu_check(*words, **env):
    command = [sys.executable, str(ROOT / "tools/gpu_check.py"), *words]
    full = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=400, check=False)


def test_every_part_passes_in_small(tmp_path):
    done = gpu_check("--device", "cpu", "--out", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(part["part"], part["status"]) for part in report["parts"]] == [
        (name, "ok") for name in ("gdn", "attention", "moe", "hybrid", "logprob", "export")
    ]
    by_name = {part["part"]: part for part in report["parts"]}
    assert 0 < by_name["gdn"]["worst_relative"] < 1e-4
    assert 0 < by_name["moe"]["logprob_mean_abs_nats"] < 0.05
    assert report["versions"]["torch"]


def test_without_a_gpu_it_says_so():
    done = gpu_check(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.endswith("gpu_check: torch sees no CUDA device; --device cpu runs the same parts in small\n")


def test_an_unknown_part_is_named():
    done = gpu_check("--parts", "gdn,attentoin")
    assert done.returncode == 1
    assert "attentoin is not one of gdn, attention" in done.stderr
