"""One rank's process: which device it computes on, and the default process group it belongs to."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore, Store  # pyright: ignore[reportPrivateImportUsage]

from parallel import cpu_megatron


@dataclass(frozen=True)
class Runtime:
    """What a rank knows about itself. backend: gloo on CPU, nccl on CUDA."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks meet. store: a file shared by them; None means torchrun's environment, or a process on its own."""

    rank: int
    world_size: int
    local_rank: int
    store: Path | None = None


def resolve_device(device: str) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`; ValueError for another name or for cuda where there is none."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={device!r} must be auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device=cuda, but torch sees no CUDA device here: use device=cpu, or a CUDA build of torch on a GPU machine"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def torchrun_rendezvous() -> Rendezvous:
    """The place torchrun gave this process, or that of a single process when it was not started by torchrun."""
    if "RANK" not in os.environ:
        return Rendezvous(rank=0, world_size=1, local_rank=0)
    return Rendezvous(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ.get("LOCAL_RANK", "0")),
    )


def _prepare_device(kind: str, local_rank: int) -> torch.device:
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    cpu_megatron.install()
    # Ranks share the cores: with more threads than cores a first step was seen to take a minute and a half.
    torch.set_num_threads(1)
    return torch.device("cpu")


def _store(rendezvous: Rendezvous) -> Store | None:
    if rendezvous.store is not None:
        return FileStore(str(rendezvous.store), rendezvous.world_size)
    if "RANK" in os.environ:
        return None
    return HashStore()


def start_runtime(device: str, *, rendezvous: Rendezvous | None = None, timeout_s: float = 1800.0) -> Runtime:
    """Choose the device, patch Megatron-Core if it is the CPU, and join the default process group.

    device: auto, cpu or cuda. rendezvous: None takes torchrun's environment (or makes a world of one).
    timeout_s bounds every collective. ValueError for an impossible device, RuntimeError when a group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("start_runtime: this process already has a default process group")
    place = rendezvous or torchrun_rendezvous()
    kind = resolve_device(device)
    torch_device = _prepare_device(kind, place.local_rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_store(place),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return Runtime(place.rank, place.world_size, place.local_rank, torch_device, backend)


def stop_runtime() -> None:
    """Leave the default process group, if there is one. The CPU patches stay: they are for the process' lifetime."""
    if dist.is_initialized():
        dist.destroy_process_group()
