"""A vLLM server given by URL: the same seam, the same checks; one server start for the whole file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import hf_trainer
import psutil
import pytest
import torch

from mcore_rl.config.schema import SyncConfig
from mcore_rl.ranks import free_port
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_url import UrlLink
from mcore_rl.sync.digest import wire_digest
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import EngineDied, Prompt, SamplingParams, StaleRollout, WeightMismatch

SAMPLING = SamplingParams(temperature=1.0, max_tokens=8, stop_token_ids=(2,), samples_per_prompt=4, seed=7)
PROMPTS = [Prompt(f"p{i}", tuple(range(3 + i, 90 + 2 * i)), "", "") for i in range(6)]


@pytest.fixture(scope="module")
def models():
    """Experts of width 48: padded inside the engine."""
    torch.set_num_threads(1)
    return {"a": hf_trainer.build(hf_trainer.moe_config(48), 1), "b": hf_trainer.build(hf_trainer.moe_config(48), 2)}


@pytest.fixture(scope="module")
def server(models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command a user runs, with prefix caching on in small blocks."""
    folder = tmp_path_factory.mktemp("server")
    path = hf_trainer.save(models["a"], folder / "model")
    port = free_port()
    command = [sys.executable, "-m", "mcore_rl.rollout.vllm_server", "--model", str(path), "--port", str(port)]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--max-num-seqs", "64", "--enable-prefix-caching", "--block-size", "32"],
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    yield process, f"http://127.0.0.1:{port}"
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def connect(url: str) -> VllmEngine:
    link = UrlLink(url, start_timeout_s=900, request_timeout_s=100, max_connections=64)
    return VllmEngine(link, max_model_len=256)


@pytest.fixture(scope="module")
def engine(server) -> Iterator[VllmEngine]:
    """Ready, not yet synced."""
    engine = connect(server[1])
    engine.wait_ready()
    yield engine
    engine.close()


@pytest.fixture
def push(engine, models):
    """push(model, version): a proved sync through one session per test."""
    probe = hf_trainer.sequences(320)
    session = WeightSync(engine, SyncConfig(bucket_bytes=100_000, probe_max_nats=1e-4), probe_sequences=probe)

    def go(which: str, version: int):
        source = hf_trainer.HfSource(hf_trainer.hf_tensors(models[which]), version)
        return session.sync(source, lambda: hf_trainer.hf_logprobs(models[which], probe))

    return go


def test_before_the_first_sync_nothing_is_sampled(engine):
    with pytest.raises(StaleRollout, match="no proved weights"):
        engine.generate(PROMPTS, SAMPLING)


def test_there_and_back(engine, models, push):
    """Versions echoed, transformers' log-probs after every sync, prefix cache emptied, exact return."""
    seen = []
    for version, which in enumerate("aba"):
        report = push(which, version)
        assert report.probe_max_nats < 1e-5
        completions = engine.generate(PROMPTS, SAMPLING)
        assert {c.version for c in completions} == {version}
        assert [(c.prompt_id, c.sample_index) for c in completions] == [(p.prompt_id, i) for p in PROMPTS for i in range(4)]
        whole = [c.prompt_token_ids + c.token_ids for c in completions]
        for completion, row in zip(completions, hf_trainer.hf_logprobs(models[which], whole), strict=True):
            assert completion.logprobs == pytest.approx(row[-len(completion.token_ids) :], abs=1e-5)
        seen.append([c.token_ids for c in completions])
    assert seen[0] == seen[2] != seen[1]


def test_a_refusal_keeps_its_reason_over_http(engine, push):
    push("a", 0)
    engine.begin()
    with pytest.raises(WeightMismatch, match=r"unknown tensor 'model\.norm\.wait'"):
        engine.load(0, [["model.norm.wait", "float32", [64], 0, wire_digest(torch.zeros(64))]])
    engine.abort()
    with pytest.raises(StaleRollout):
        engine.generate(PROMPTS, SAMPLING)
    push("a", 1)


def test_a_label_set_by_someone_else_is_stale(engine, push, server):
    push("a", 0)
    other = connect(server[1])
    other.link.set_version("9")
    with pytest.raises(StaleRollout, match=r"sampled with weights \['9'\], version 0 was proved"):
        engine.generate(PROMPTS, SAMPLING)


class Bare(BaseHTTPRequestHandler):
    """A server without the routes for weight updates."""

    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *_):
        """Quiet."""


def test_a_server_without_the_routes_is_refused_by_name():
    server = HTTPServer(("127.0.0.1", 0), Bare)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.raises(ValueError, match=r"no route /weight_info: start the server with environment VLLM_SERVER_DEV_MODE=1"):
        connect(f"http://127.0.0.1:{server.server_port}").wait_ready()
    server.shutdown()
    server.server_close()


def test_nobody_there_is_said_in_time():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        link = UrlLink(f"http://127.0.0.1:{taken.getsockname()[1]}", start_timeout_s=1, request_timeout_s=1, max_connections=4)
        with pytest.raises(EngineDied, match="did not answer within 1 s"):
            link.wait_ready()


def test_killed_while_generating(engine, push, server):
    """Last in the file: the server does not come back."""
    push("a", 0)
    process, _ = server
    family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    long = SamplingParams(temperature=1.0, max_tokens=160, stop_token_ids=(), samples_per_prompt=8)
    threading.Timer(1.0, lambda: os.kill(process.pid, signal.SIGKILL)).start()
    started = time.monotonic()
    with pytest.raises(
        EngineDied, match=r"vllm at http://127.0.0.1:\d+ .* died or is unreachable during '/inference/v1/generate'"
    ):
        for _ in range(50):
            engine.generate(PROMPTS, long)
    assert time.monotonic() - started < 60
    with pytest.raises(EngineDied):
        engine.health()
    with pytest.raises(EngineDied, match="during"):
        push("b", 1)
    assert engine.version is None
    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in family if psutil.pid_exists(pid)], timeout=30)
    assert not alive, (gone, alive)
