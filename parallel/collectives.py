"""Small collectives over all ranks of the run. Only builtins travel, never pickled classes; a failure on one rank is
raised on all of them.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


class _BuiltinPickler(pickle.Pickler):
    """Pickles None, bool, int, float, str, bytes, list, tuple, dict and set; anything else is a TypeError."""

    def reducer_override(self, obj: Any) -> Any:
        raise TypeError(f"only builtins travel between ranks, not {type(obj).__module__}.{type(obj).__qualname__}")


class _BuiltinUnpickler(pickle.Unpickler):
    """The other end: refuses to import anything."""

    def find_class(self, module: str, name: str) -> Any:
        raise TypeError(f"only builtins travel between ranks, not {module}.{name}")


def _encode(value: Any) -> Tensor:
    buffer = io.BytesIO()
    _BuiltinPickler(buffer, protocol=5).dump(value)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(communication_device())


def _decode(data: Tensor) -> Any:
    return _BuiltinUnpickler(io.BytesIO(data.cpu().numpy().tobytes())).load()


def communication_device() -> torch.device:
    """Where a tensor must live to be sent over the default group: the CPU for gloo, this rank's GPU for nccl."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def broadcast_builtins(value: Any, *, source: int = 0) -> Any:
    """Rank `source`'s value on every rank. Other ranks' argument is ignored. TypeError for what is not a builtin."""
    mine = dist.get_rank() == source
    data = _encode(value) if mine else torch.empty(0, dtype=torch.uint8, device=communication_device())
    size = torch.tensor([data.numel()], dtype=torch.int64, device=communication_device())
    dist.broadcast(size, src=source)
    if not mine:
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=communication_device())
    dist.broadcast(data, src=source)
    return _decode(data)


def gather_builtins(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank. TypeError for what is not a builtin."""
    data = _encode(value)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=communication_device())
    sizes[dist.get_rank()] = data.numel()
    dist.all_reduce(sizes)
    longest = int(sizes.max().item())
    padded = torch.zeros(longest, dtype=torch.uint8, device=communication_device())
    padded[: data.numel()] = data
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, padded)
    return [_decode(part[:size]) for part, size in zip(gathered, sizes.tolist(), strict=True)]


def _describe(error: Exception) -> tuple[str, str, str]:
    kind = type(error)
    return kind.__module__, kind.__qualname__, str(error)


def _rebuild(module: str, name: str, message: str) -> Exception:
    # Only a class that this process has loaded already: nothing is imported on another rank's word.
    kind = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(message)
        except TypeError:  # the class wants other arguments
            pass
    return RuntimeError(f"{name}: {message}")


def on_rank0(function: Callable[[], T]) -> T:
    """Run `function` on rank 0 and return its result (builtins) on every rank.

    An exception on rank 0 is raised on every rank, with the same type and message. Collective.
    """
    if dist.get_rank() != 0:
        error, value = broadcast_builtins((None, None))
        if error is not None:
            raise _rebuild(*error)
        return value
    try:
        value = function()
        _encode(value)
    except Exception as failure:
        broadcast_builtins((_describe(failure), None))
        raise
    broadcast_builtins((None, value))
    return value


def raise_together(error: Exception | None) -> None:
    """Raise on every rank when any rank brings an error: its own there, on the others one that names the first such rank."""
    failures = gather_builtins(None if error is None else _describe(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            module, name, message = failure
            raise _rebuild(module, name, f"rank {rank}: {message}")


@contextmanager
def together() -> Iterator[None]:
    """What is inside either succeeds on every rank or raises on every rank. No collective inside may wait for a failed rank."""
    try:
        yield
    except Exception as failure:
        raise_together(failure)
        raise
    raise_together(None)


def agree(flag: bool) -> bool:
    """True when every rank says True. Collective."""
    votes = torch.tensor([int(flag)], dtype=torch.int64, device=communication_device())
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


def all_reduce_sum(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum over the group's ranks (None: all ranks), in a new tensor."""
    total = tensor.detach().clone()
    dist.all_reduce(total, group=group)
    return total


def barrier() -> None:
    """Wait for every rank."""
    dist.barrier()
