"""An owned engine that dies, hangs, runs out of memory or refuses at every point of a weight sync: real processes and
pipes, a stand-in for vllm in the child."""

from __future__ import annotations

import os
import signal
import socket
import struct
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from fault_table import record

from mcore_rl.config.schema import SyncConfig
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink, Pipe
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import EngineDied, Prompt, SamplingParams, StaleRollout, TensorMeta, WeightMismatch

STAND_IN = Path(__file__).parents[1] / "support" / "stand_in_vllm"
SHAPES = {f"t{i}": [i + 1, 8] for i in range(5)}
PROBE = [[1, 2, 3], [4, 5]]
VALUES = [[-1.0, -1.0], [-1.0]]
PLACES = ("init", "start", "update0", "update2", "update4", "finish", "readback", "score", "version")
SAMPLING = SamplingParams(temperature=1.0, max_tokens=1, stop_token_ids=())


class Source:
    """Five tensors, one per bucket."""

    def __init__(self) -> None:
        self.version = 1
        self.tensors = {name: torch.full(shape, 1.5) for name, shape in SHAPES.items()}

    def metadata(self):
        return tuple(TensorMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items())

    def held_names(self):
        return frozenset(self.tensors)

    def bucket(self, names):
        return iter([(name, self.tensors[name]) for name in names])

    def __iter__(self):
        return iter(self.tensors.items())


@pytest.fixture
def start(tmp_path):
    links = []

    def build(fault, *, request_timeout_s=20.0):
        environment = {**os.environ, "PYTHONPATH": f"{STAND_IN}:{Path(__file__).parents[2]}"}
        link = OwnedLink(
            {"tensors": SHAPES, "fault": fault},
            environment,
            log_path=tmp_path / "engine.log",
            start_timeout_s=60,
            request_timeout_s=request_timeout_s,
        )
        links.append(link)
        engine = VllmEngine(link, max_model_len=64)
        return engine, WeightSync(engine, SyncConfig(bucket_bytes=64), probe_sequences=PROBE)

    yield build
    for link in links:
        link.close()


def fails(engine, session, kind, message):
    """The sync fails with this message and nothing can be sampled; returns the seconds it took."""
    engine.wait_ready()
    started = time.perf_counter()
    with pytest.raises(kind, match=message):
        session.sync(Source(), lambda: VALUES)
    seconds = time.perf_counter() - started
    assert engine.version is None
    with pytest.raises(StaleRollout):
        engine.generate([Prompt("p", (1, 2), "", "")], SAMPLING)
    return seconds


def test_the_stand_in_is_synced_like_an_engine(start):
    engine, session = start({})
    report = session.sync(Source(), lambda: VALUES)
    assert (report.version, report.buckets, report.readback_tensors, engine.version) == (1, 5, 5, 1)


@pytest.mark.parametrize("place", PLACES)
def test_the_engine_dies(start, place):
    engine, session = start({"at": place, "how": "die"})
    record(f"engine killed in {place}", "pipe", fails(engine, session, EngineDied, "died during .*SIGKILL"))


@pytest.mark.parametrize("place", ["start", "update2", "finish"])
def test_the_engine_hangs(start, place):
    engine, session = start({"at": place, "how": "hang"}, request_timeout_s=0.3)
    seconds = fails(engine, session, EngineDied, "did not answer .* and was stopped")
    record(f"engine hangs in {place}", "time limit", seconds)
    assert seconds < 5


@pytest.mark.parametrize("place", ["start", "update0", "update4", "finish"])
def test_the_engine_runs_out_of_memory(start, place):
    engine, session = start({"at": place, "how": "oom"})
    seconds = fails(engine, session, EngineDied, f"died .*MemoryError: no memory in {place}")
    record(f"engine out of memory in {place}", "pipe", seconds)


@pytest.mark.parametrize("place", ["start", "update0", "update2", "update4", "finish"])
def test_the_engine_refuses(start, place):
    """Refused once; the process lives, so the very next sync is clean."""
    engine, session = start({"at": place, "how": "refuse"})
    record(f"engine refuses {place}", "answer", fails(engine, session, WeightMismatch, f"no in {place}"))


@pytest.mark.parametrize("place", ["start", "update0", "update2", "update4", "finish"])
def test_a_refusal_that_only_one_worker_has_and_nobody_raises(start, place):
    engine, session = start({"at": place, "how": "tell"})
    fails(engine, session, WeightMismatch, f"engine.log.: worker 1 of 2: no in {place}")


def test_an_update_that_another_trainer_left_open_is_dropped(start):
    engine, session = start({})
    engine.wait_ready()
    engine.link.native("start", {})
    assert session.sync(Source(), lambda: VALUES).version == 1


MANY = [{"token_ids": list(range(1000)), "sampling": {}} for _ in range(200)]  # more than a socket holds


@pytest.mark.parametrize("requests", [MANY[:0], MANY], ids=["small", "large"])
def test_the_engine_is_stopped(start, requests):
    """By SIGSTOP, as a debugger or a cgroup freezer does: it neither reads nor dies."""
    engine, _ = start({}, request_timeout_s=0.5)
    engine.wait_ready()
    os.kill(engine.link.pid, signal.SIGSTOP)
    started = time.perf_counter()
    with pytest.raises(EngineDied, match=r"did not answer 'score' within .* and was stopped"):
        engine.link.score(requests)
    assert time.perf_counter() - started < 3
    with pytest.raises(EngineDied, match="SIGKILL"):
        engine.link.health()


@pytest.mark.parametrize("said", [b"", b"\0\0", struct.pack("!i", 10**6) + b'{"result": ['], ids=["none", "header", "part"])
def test_the_engine_stops_in_the_middle_of_its_answer(start, said):
    engine, _ = start({}, request_timeout_s=0.5)
    engine.wait_ready()
    ours, theirs = socket.socketpair()
    real, engine.link._pipe = engine.link._pipe, Pipe(ours, lambda: False)
    theirs.sendall(said)
    started = time.perf_counter()
    with theirs, pytest.raises(EngineDied, match=r"did not answer 'score' within .* and was stopped"):
        engine.link.score([])
    real.close()
    assert time.perf_counter() - started < 3


def test_a_dead_engine_whose_child_holds_the_pipe_is_noticed(start):
    engine, _ = start({}, request_timeout_s=60)
    engine.wait_ready()
    ours, theirs = socket.socketpair()
    real, engine.link._pipe = engine.link._pipe, Pipe(ours, lambda: engine.link._process.poll() is not None)
    threading.Timer(0.3, os.kill, (engine.link.pid, signal.SIGKILL)).start()
    started = time.perf_counter()
    with theirs, pytest.raises(EngineDied, match="died during 'score': killed by SIGKILL"):
        engine.link.score(MANY)
    real.close()
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("size", [0, 1, 5_000_000])
def test_a_pipe_speaks_as_the_childs_connection(size):
    ours, theirs = socket.socketpair()
    message = bytes(size)
    pipe, far = Pipe(ours, lambda: False), Connection(theirs.detach())
    echo = threading.Thread(target=lambda: far.send_bytes(far.recv_bytes()), daemon=True)
    echo.start()
    deadline = time.monotonic() + 20
    pipe.send(message, deadline)
    assert pipe.receive(deadline) == message
    os.write(far.fileno(), struct.pack("!iQ", -1, 3) + b"abc")  # how a Connection starts more than 2 GiB
    assert pipe.receive(deadline) == b"abc"
    echo.join()
    far.close()
    with pytest.raises(EOFError):
        pipe.receive(deadline)
    pipe.close()
