"""`mcore-rl train` against a vLLM server it does not own: two steps, then the server dies in generation and in a sync."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from cli_runs import CACHE_RESET, FINISHED_LOADING, start_run, wait_for, wait_for_line, wait_for_rows

from mcore_rl.config.schema import BuildConfig, RolloutConfig
from mcore_rl.ranks import free_port
from mcore_rl.rollout.vllm_server import server_command, server_environment
from mcore_rl.tiny_model import build_tiny

LIMIT_S = 60.0
BUILD = BuildConfig(
    hf_config={
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
)


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def kill(self) -> None:
        """SIGKILL to the server and everything it started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny(tmp_path_factory.mktemp("model") / "tiny", BUILD, seed=3)


@pytest.fixture
def server(model, tmp_path):
    """A server as the README tells to start it."""
    config = RolloutConfig(max_model_len=128)
    port, log = free_port(), tmp_path / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            server_command(config, str(model), port=port),
            env=server_environment(config),
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    running = Server(process, f"http://127.0.0.1:{port}", log)
    wait_for(lambda: b"Application startup complete" in log.read_bytes() or process.poll() is not None, 300.0, "the server")
    assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    yield running
    if process.poll() is None:
        running.kill()


def _run(tmp_path, model, server, name, *overrides):
    placement = ("rollout.placement=url", f"rollout.url=[{server.url}]", "rollout.max_engine_restarts=0")
    return start_run(tmp_path, name, f"model.path={model}", "model.build=null", *placement, *overrides)


def _ends_well(run, server):
    server.kill()
    started = time.monotonic()
    code, _, err = run.finish(LIMIT_S)
    last = err.strip().splitlines()[-1]
    assert code != 0
    assert server.url in last or server.url.removeprefix("http://") in last, err[-1500:]
    assert "Traceback" not in err
    assert run.leftovers() == []
    assert run.summary()["exit_reason"] not in ("completed", "")
    assert time.monotonic() - started < LIMIT_S


def test_two_steps_then_the_server_dies_in_generation(tmp_path, model, server):
    complete = _run(tmp_path, model, server, "two_steps", "train.steps=2")
    code, _, err = complete.finish(300.0)
    assert code == 0, err[-2000:]
    assert [row["version"] for row in complete.rows()] == [2, 4]
    assert max(row["delta_max_abs_nats"] for row in complete.rows()) <= 1e-3
    assert complete.summary()["export_check"]["matched"] > 0
    assert psutil.pid_exists(server.process.pid)  # a server that is not ours is left running

    endless = _run(tmp_path, model, server, "generation", "train.steps=100000", "rollout.max_tokens=100")
    wait_for_rows(endless, 1)
    wait_for_line(server.log, CACHE_RESET)
    time.sleep(0.5)
    _ends_well(endless, server)


def test_the_server_dies_in_a_sync(tmp_path, model, server):
    run = _run(tmp_path, model, server, "sync", "train.steps=100000", "rollout.max_tokens=2")
    wait_for_rows(run, 1)
    wait_for_line(server.log, FINISHED_LOADING)
    _ends_well(run, server)
