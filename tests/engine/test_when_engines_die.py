"""Deaths of owned engines. Last in the folder: these tests use the shared engines up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.types import EngineDied, Prompt, SamplingParams

LIMIT_S = 60
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [Prompt(f"p{i}", tuple(range(3 + i, 30 + i)), "", "") for i in range(8)]
LONG = SamplingParams(temperature=1.0, max_tokens=200, stop_token_ids=(), samples_per_prompt=8)


def test_killed_while_generating(moe_ready):
    moe_ready.renew()
    moe_ready.sync("a", 0)
    pid = moe_ready.link.pid
    threading.Timer(1.0, lambda: os.kill(pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(EngineDied, match=r"vllm owned \(log .*engine.log\) died during 'generate': killed by SIGKILL"):
        for _ in range(50):
            moe_ready.engine.generate(PROMPTS, LONG)
    assert time.monotonic() - started < LIMIT_S
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineDied):
        moe_ready.engine.health()


def test_killed_in_a_sync(dense_ready):
    """Between two buckets; the sync ends with the death, the version is gone, nothing is left in shared memory."""
    session = dense_ready.renew(bucket_bytes=10_000)
    dense_ready.sync("a", 0)
    pid = dense_ready.link.pid
    source = dense_ready.source("b", 1)
    handed_out = source.bucket

    def bucket(names):
        if "model.layers.1.mlp.down_proj.weight" in names:
            os.kill(pid, signal.SIGKILL)
        return handed_out(names)

    source.bucket = bucket
    started = time.monotonic()
    with pytest.raises(EngineDied, match="died during 'native': killed by SIGKILL"):
        session.sync(source, lambda: dense_ready.trainer_logprobs("b"))
    assert time.monotonic() - started < LIMIT_S
    assert dense_ready.engine.version is None
    assert not psutil.pid_exists(pid)
    assert not list(Path("/dev/shm").glob(f"mcore_rl_sync_{os.getpid()}_*"))


def stand_in(folder: Path, body: str, start_timeout_s: float) -> OwnedLink:
    """A link whose child finds a package `vllm` that does `body` when imported."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").write_text(body)
    environment = engine_environment(RolloutConfig(), device="cpu")
    environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
    return OwnedLink(
        engine_arguments(RolloutConfig(), "nowhere", device="cpu"),
        environment,
        log_path=folder / "engine.log",
        start_timeout_s=start_timeout_s,
        request_timeout_s=10,
    )


def test_a_child_that_cannot_start_says_where_to_look(tmp_path):
    link = stand_in(tmp_path, "raise RuntimeError('no kernel for this machine')", 300)
    died = rf"log {tmp_path}/engine.log\) died during 'start': exit code 1; last line: RuntimeError: no kernel for this machine"
    with pytest.raises(EngineDied, match=died):
        link.wait_ready()
    link.close()


def test_too_slow_a_start_is_stopped(tmp_path):
    link = stand_in(tmp_path, "import time; time.sleep(100)", 0.5)
    with pytest.raises(EngineDied, match="did not answer 'start' within"):
        link.wait_ready()
    assert not psutil.pid_exists(link.pid)


PARENT = """
import signal, sys, time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
from mcore_rl.config.schema import RolloutConfig
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.vllm_owned import OwnedLink
folder = Path(sys.argv[1])
environment = engine_environment(RolloutConfig(), device="cpu")
environment["PYTHONPATH"] = f"{folder}:{environment['PYTHONPATH']}"
link = OwnedLink(engine_arguments(RolloutConfig(), "nowhere", device="cpu"), environment,
                 log_path=folder / "engine.log", start_timeout_s=100, request_timeout_s=100)
print(link.pid, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_child_goes_with_its_parent(tmp_path, ending):
    """As a rank of torchrun would start it; the child is busy (importing vllm) and reads nothing."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import time; open('busy', 'w').close(); time.sleep(300)")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env, cwd=tmp_path) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        while not (tmp_path / "busy").exists():
            time.sleep(0.1)
        seen = child.environ()
        parent.send_signal(ending)
        parent.wait(20)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(seen)
    assert json.loads(seen["VLLM_ENABLE_V1_MULTIPROCESSING"]) == 0
    gone, _ = psutil.wait_procs([child], timeout=20)
    assert gone or child.status() == psutil.STATUS_ZOMBIE
