"""The offline wandb run: no network, no login, everything in the run folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_rl.telemetry.wandb_sink import WandbSink

ROOT = Path(__file__).parents[2]
SCRIPT = """
import math, sys
from pathlib import Path
from mcore_rl.telemetry.wandb_sink import WandbSink
sink = WandbSink(Path(sys.argv[1]), mode="offline", project="p", name="n", config={"marker_in_config": 1})
for step in range(3):
    sink.log_step(step, {"marker_metric": math.nan if step == 1 else float(step), "load": [1.0, 2.0, 3.0]})
    sink.log_rollouts(step, [{"id": 0}])
sink.close()
"""


def test_offline_needs_no_login_and_stays_in_the_folder(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    clean = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    env = {**clean, "HOME": str(home), "PYTHONPATH": str(ROOT), "HTTPS_PROXY": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "run")], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    content = record.read_bytes()
    assert content.count(b"marker_metric") >= 3
    assert b"NaN" in content
    assert b"marker_in_config" in content
    assert not list(home.iterdir())


def test_unknown_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"telemetry\.wandb=on: one of offline, online, disabled"):
        WandbSink(tmp_path, mode="on", project="p", name="n", config={})
