"""Starting and stopping a rank: devices, torchrun's environment, a process on its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parallel.runtime import Rendezvous, resolve_device, torchrun_rendezvous

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes
import json
import os
import signal
from pathlib import Path
import torch
import torch.distributed as dist
from parallel.runtime import start_runtime, stop_runtime
from parallel import cpu_megatron
ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)  # with its parent, when the test gives up waiting
runtime = start_runtime("cpu")
total = torch.tensor([runtime.rank + 1.0])
dist.all_reduce(total)
try:
    start_runtime("cpu")
    second = None
except RuntimeError as error:
    second = str(error)
stop_runtime()
stop_runtime()
told = [runtime.rank, runtime.world_size, runtime.local_rank, str(runtime.device), runtime.backend, total.item(), second,
        torch.get_num_threads(), cpu_megatron.installed(), dist.is_initialized()]
os.write(1, (json.dumps(told) + chr(10)).encode())  # one write: lines of two ranks do not mix
"""


def environment():
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return kept | {"PYTHONPATH": str(ROOT)}


def told(output):
    return sorted(json.loads(line) for line in output.splitlines() if line.startswith("["))


EXPECTED_END = ["start_runtime: this process already has a default process group", 1, True, False]


def test_a_process_on_its_own():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [[0, 1, 0, "cpu", "gloo", 1.0, *EXPECTED_END]]


def test_under_torchrun(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert told(done.stdout) == [[rank, 2, rank, "cpu", "gloo", 3.0, *EXPECTED_END] for rank in range(2)]


def test_devices():
    assert resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="device='tpu' must be auto, cpu or cuda"):
        resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens on a machine without CUDA")
def test_cuda_where_there_is_none():
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="torch sees no CUDA device"):
        resolve_device("cuda")


def test_rendezvous(monkeypatch):
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    assert torchrun_rendezvous() == Rendezvous(rank=0, world_size=1, local_rank=0)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert torchrun_rendezvous() == Rendezvous(rank=5, world_size=8, local_rank=1)
