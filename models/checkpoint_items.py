"""Single tensors inside the files of a Megatron distributed checkpoint: each is what `torch.save` writes, end to end.

The bytes around the data depend on dtype and shape only, so they are made once and the data is written (or read) where it
lies, without a copy. Checksums inside these archives are left out, as `torch.serialization.set_crc32_options` allows; the
converter's own digests are kept beside them.
"""

from __future__ import annotations

import io
import math
import mmap
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from models.hf_file import raw_bytes

BROKEN_PICKLE = torch.serialization.pickle.UnpicklingError  # pyright: ignore[reportPrivateImportUsage]
_MARK = 0xA5
_SMALLEST_FRAMED_BYTES = 64
_FRAMED_BYTES = 32 * 1024**2  # larger tensors are few: torch.save itself, without holding a second copy for the frame


@lru_cache(maxsize=512)
def _frame(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What stands before and after the data of a contiguous tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    marked = torch.full((nbytes,), _MARK, dtype=torch.uint8).view(dtype).reshape(shape)
    with io.BytesIO() as stream:
        _save(marked, stream)
        saved = stream.getvalue()
    start = saved.find(bytes([_MARK]) * nbytes)
    if start < 0:
        raise RuntimeError(f"torch.save wrote {dtype} {list(shape)} in an unknown way")
    return saved[:start], saved[start + nbytes :]


def _save(tensor: Tensor, stream: BinaryIO | io.BytesIO) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, stream)
    finally:
        torch.serialization.set_crc32_options(before)


def _framed(dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return _SMALLEST_FRAMED_BYTES <= math.prod(shape) * dtype.itemsize <= _FRAMED_BYTES


def write_item(stream: BinaryIO, tensor: Tensor) -> int:
    """Append a contiguous CPU tensor; returns how many bytes were written."""
    shape = tuple(tensor.shape)
    if not _framed(tensor.dtype, shape):
        before = stream.tell()
        _save(tensor.clone() if tensor.untyped_storage().nbytes() != tensor.nbytes else tensor, stream)
        return stream.tell() - before
    head, tail = _frame(tensor.dtype, shape)
    data = raw_bytes(tensor)
    for part in (head, data, tail):
        stream.write(part)
    return len(head) + len(data) + len(tail)


def digest_of(tensor: Tensor) -> str:
    """xxh3-64 of the tensor's bytes, in hexadecimal."""
    return xxhash.xxh3_64(raw_bytes(tensor)).hexdigest()


def digest_of_file(path: Path) -> str:
    """xxh3-64 of a small file's bytes, in hexadecimal."""
    return xxhash.xxh3_64(path.read_bytes()).hexdigest()


class ItemFile:
    """A file of items, mapped."""

    def __init__(self, path: Path) -> None:
        """Map the file."""
        self.path = path
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def read(self, place: tuple[int, int], dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor at (offset, length): a view of the file when it is framed as `write_item` does, else torch.load's.

        ValueError when the bytes there are not a tensor of that shape.
        """
        offset, length = place
        if _framed(dtype, shape):
            head, _ = _frame(dtype, shape)
            if self._map[offset : offset + len(head)] == head:
                count = math.prod(shape)
                return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset + len(head)).reshape(shape)
        return self._load(offset, length, shape)

    def _load(self, offset: int, length: int, shape: tuple[int, ...]) -> Tensor:
        try:
            with memoryview(self._map) as view, io.BytesIO(view[offset : offset + length]) as stream:
                tensor = torch.load(stream, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, ValueError, BROKEN_PICKLE) as error:
            raise ValueError(f"{self.path}: bytes {offset} to {offset + length} are not a tensor") from error
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"{self.path}: bytes {offset} to {offset + length} hold {found} instead of {list(shape)}")
        return tensor.detach()
