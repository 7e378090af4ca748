"""A two-slot shared-memory segment: one slot is loaded by the engine while the trainer writes the other.

A plain file in /dev/shm behind mmap: allocated (and its pages touched) once, then reused by every sync. Once everyone
has it open its name is removed, so the memory goes with the last process, however that one ends.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

SHM_ROOT = Path("/dev/shm")
SLOTS = 2
_PREFIX = "mcore_rl_sync"


class Segment:
    """SLOTS x slot_bytes of memory that trainer ranks and engine workers map."""

    def __init__(self, path: Path, slot_bytes: int, memory: mmap.mmap) -> None:
        """Use `create` or `attach`."""
        self.path = path
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    @classmethod
    def create(cls, slot_bytes: int, *, root: Path = SHM_ROOT) -> Segment:
        """A new segment with a name of its own. ValueError naming both sizes when `root` has no room for it."""
        sweep(root)
        path = root / f"{_PREFIX}_{os.getpid()}_{uuid.uuid4().hex[:12]}"
        size = SLOTS * slot_bytes
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            memory = mmap.mmap(handle, size)
        except OSError as failure:
            path.unlink()
            free = shutil.disk_usage(root).free
            raise ValueError(
                f"sync needs {SLOTS} x {slot_bytes} bytes of shared memory but {root} has {free} free ({failure.strerror});"
                " lower sync.bucket_bytes (the largest tensor is the floor) or enlarge it (docker: --shm-size)"
            ) from failure
        finally:
            os.close(handle)
        return cls(path, slot_bytes, memory)

    @classmethod
    def attach(cls, path: Path, slot_bytes: int) -> Segment:
        """Map a segment that another process created. ValueError when it is not there or not that large."""
        if not path.exists():
            raise ValueError(f"shared-memory segment {path} does not exist here: trainer and engine must share one host")
        size = SLOTS * slot_bytes
        if path.stat().st_size != size:
            raise ValueError(f"shared-memory segment {path} holds {path.stat().st_size} bytes, {size} are expected")
        with path.open("r+b") as handle:
            return cls(path, slot_bytes, mmap.mmap(handle.fileno(), size))

    def view(self, slot: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor over the segment's own memory. ValueError when it would leave its slot."""
        count = math.prod(shape)
        if not 0 <= slot < SLOTS or offset < 0 or offset + count * dtype.itemsize > self.slot_bytes:
            raise ValueError(f"{shape} {dtype} at offset {offset} of slot {slot} leaves the slot of {self.slot_bytes} bytes")
        start = slot * self.slot_bytes + offset
        return self._bytes[start : start + count * dtype.itemsize].view(dtype).view(shape)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor lives in this segment, so that the next bucket would overwrite it."""
        if tensor.device.type != "cpu":
            return False
        return tensor.untyped_storage().data_ptr() == self._bytes.untyped_storage().data_ptr()

    def unlink(self) -> None:
        """Remove the name; the memory lives on for those who have it open."""
        self.path.unlink(missing_ok=True)


def sweep(root: Path = SHM_ROOT) -> list[Path]:
    """Remove segments whose creator is gone (killed before it could); returns them."""
    removed: list[Path] = []
    for path in root.glob(f"{_PREFIX}_*"):
        found = re.fullmatch(rf"{_PREFIX}_(\d+)_[0-9a-f]{{12}}", path.name)
        if found and not Path("/proc", found[1]).exists():
            with suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed
