"""One pool of ranks for every distributed test: real Megatron-Core over gloo, at most four processes, spawned once.

How to write a test (any file under tests/dist; plain pytest, no plugin):

    from parallel.layout import ParallelLayout

    def on_each_rank(groups, device, scale):        # module-level; runs in every rank of the layout
        return float(scale * (groups.at.tp + 1))    # returns builtins or CPU tensors (through torch.save)

    def test_something(ranks):                      # the fixture of tests/dist/conftest.py
        results = ranks.run(on_each_rank, ParallelLayout(world=2, tp=2), 10.0)
        assert results == [10.0, 20.0]              # one result per rank, in rank order

* The function gets `groups` (parallel.groups.ProcessGroups), `device` (torch.device) and the arguments of `run`. Its
  file is imported inside each rank by path, so it may live in the test file or in a module of tests/support (which is on
  sys.path: `import my_helpers`); what that file imports must be importable. Arguments and results go through torch.save.
* Each `run` starts with fresh default process group, Megatron groups and seeds (`seed=`, default 1234). What a function
  leaves behind in module globals stays in the rank process: leave nothing.
* A layout of one or two ranks uses one or two of the processes; the others sleep.
* A failing rank raises RankFailure here, with that rank's number and traceback; a run that exceeds `deadline_s` too. Both
  end the processes (the next run starts new ones), because the other ranks may hang in a collective.
* Ranks die with the test process, whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import io
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch

MAX_RANKS = 4
# New processes now and then: a run can leave one process group behind (see _forget_models).
RUNS_PER_PROCESS = 32
MOST_THREADS = 120  # a forked rank costs a tenth of a second; threads of dead groups spin
# Imported once, in the process that the ranks are forked from.
PRELOAD = ["torch", "megatron.core.models.gpt.gpt_model", "megatron.core.optimizer", "megatron.core.pipeline_parallel"]
RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class RankFailure(AssertionError):
    """A rank raised, died or did not answer in time; the message holds its number and traceback."""


def _pack(value: Any) -> bytes:
    # Not plain pickle: Megatron-Core 0.19 makes every pickled tensor name its own module, so reading it would import Megatron.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _die_with_parent() -> None:
    pr_set_pdeathsig = 1
    ctypes.CDLL("libc.so.6").prctl(pr_set_pdeathsig, signal.SIGKILL)


def _load(path: str) -> ModuleType:
    name = "rank_module_" + path.replace("/", "_").replace(".", "_")
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


def _forget_models() -> None:
    """Free what holds on to process groups: each has three gloo threads, which spin once their peer is gone.

    A DistributedDataParallel is held by its hooks, these by the graph of the last forward, and that by tensors its layers
    keep: a cycle through C++ that the garbage collector cannot see.
    """
    from megatron.core.distributed import DistributedDataParallel  # noqa: PLC0415

    for item in gc.get_objects():
        if type(item) is DistributedDataParallel:
            vars(item).clear()
    gc.collect()


def _run_call(rank: int, call: dict[str, Any]) -> Any:
    from parallel import groups as parallel_groups  # noqa: PLC0415  (imports Megatron: only in the ranks)
    from parallel.layout import ParallelLayout  # noqa: PLC0415
    from parallel.runtime import Rendezvous, start_runtime, stop_runtime  # noqa: PLC0415

    layout = ParallelLayout(**call["layout"])
    place = Rendezvous(rank=rank, world_size=layout.world, local_rank=rank, store=Path(call["store"]))
    runtime = start_runtime("cpu", rendezvous=place, timeout_s=call["deadline_s"])
    groups = parallel_groups.initialize_groups(layout, call["seed"])
    function = getattr(_load(call["file"]), call["function"])
    result = function(groups, runtime.device, *call["args"], **call["kwargs"])
    parallel_groups.destroy_groups()
    stop_runtime()
    _forget_models()
    return result


def _rank_main(rank: int, pipe: Connection, path: list[str]) -> None:
    _die_with_parent()
    sys.path[:] = path
    os.environ.update(RANK_ENVIRONMENT)
    with contextlib.suppress(EOFError):
        while True:
            call = _unpack(pipe.recv_bytes())
            try:
                answer = _pack((True, _run_call(rank, call)))
            except BaseException:  # noqa: BLE001  (whatever it was, it is reported to the test)
                answer = _pack((False, traceback.format_exc()))
            pipe.send_bytes(answer)


class RankPool:
    """The pool. Use the session fixture `ranks`; see the module's docstring."""

    def __init__(self) -> None:
        """Nothing is started until the first run."""
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = Path(tempfile.mkdtemp(prefix="mcore_rl_ranks_"))
        self._runs = 0

    def run(
        self, function: Callable[..., Any], layout: Any, *args: Any, seed: int = 1234, deadline_s: float = 300.0, **kwargs: Any
    ) -> list[Any]:
        """Call `function(groups, device, *args, **kwargs)` in every rank of `layout`; the results in rank order."""
        if layout.world > MAX_RANKS:
            raise ValueError(f"the pool has {MAX_RANKS} ranks, the layout {layout.world}")
        self._runs += 1
        if self._runs % RUNS_PER_PROCESS == 0:
            self.close()
        call = {
            "file": str(Path(function.__code__.co_filename).resolve()),
            "function": function.__name__,
            "layout": asdict(layout),
            "store": str(self._folder / f"store_{self._runs}"),
            "seed": seed,
            "deadline_s": deadline_s,
            "args": args,
            "kwargs": kwargs,
        }
        self._start(layout.world)
        message = _pack(call)
        for pipe in self._pipes[: layout.world]:
            pipe.send_bytes(message)
        results = self._collect(layout.world, function.__name__, deadline_s)
        self._replace_crowded()
        return results

    def _replace_crowded(self) -> None:
        """What keeps a process group alive keeps its gloo threads alive; a rank with too many gets a fresh process."""
        if any(len(list(Path(f"/proc/{pid}/task").iterdir())) > MOST_THREADS for pid in self.pids()):
            self.close()

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with _environment(RANK_ENVIRONMENT):
            for rank in range(len(self._processes), count):
                here, there = context.Pipe()
                process = context.Process(target=_rank_main, args=(rank, there, sys.path), daemon=True, name=f"rank{rank}")
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)

    def _collect(self, count: int, name: str, deadline_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        end = time.monotonic() + deadline_s
        while len(results) < count:
            waiting = [rank for rank in range(count) if rank not in results]
            ready = wait([self._pipes[rank] for rank in waiting], timeout=max(0.0, end - time.monotonic()))
            if not ready:
                self._fail(f"{name}: ranks {waiting} did not answer within {deadline_s} s")
            for rank in [rank for rank in waiting if self._pipes[rank] in ready]:
                results[rank] = self._receive(rank, name)
        return [results[rank] for rank in range(count)]

    def _receive(self, rank: int, name: str) -> Any:
        try:
            good, value = _unpack(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self._fail(f"{name}: rank {rank} died without an answer")
        if not good:
            self._fail(f"{name}: rank {rank} of the pool failed:\n{value}")
        return value

    def _fail(self, message: str) -> Any:
        self.close()
        raise RankFailure(message)

    def pids(self) -> list[int]:
        """Process ids of the ranks that are alive now."""
        return [process.pid for process in self._processes if process.pid is not None and process.is_alive()]

    def close(self) -> None:
        """End every rank and what it had started (Megatron's savers outlive it); the next run starts new ones."""
        started: list[psutil.Process] = []
        for pid in self.pids():
            with contextlib.suppress(psutil.NoSuchProcess):
                started += psutil.Process(pid).children(recursive=True)
        for process in [*self._processes, *started]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def dispose(self) -> None:
        """End every rank and remove the folder of the stores."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Any:
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
