"""One safetensors file: its header checked against its size, its tensors as views of the mapped file.

The format: 8 bytes header length, a JSON header (name -> dtype, shape, data_offsets), then the data. A view costs no memory
of its own: pages are the kernel's, read when they are touched.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH_BYTES = 8
ALIGNMENT = 8
_MAX_HEADER_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file. dtype as safetensors spells it; start and stop are bytes from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor's data."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def _size(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


class SafetensorsFile:
    """A file's entries, in the order of their data. Every error is a ValueError naming the file, and the tensor if any."""

    def __init__(self, path: Path) -> None:
        """Read and check the header; the data is not touched."""
        self.path = path
        self._size = path.stat().st_size
        self.metadata, self.entries = self._parse()
        self._map: mmap.mmap | None = None

    def _broken(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is not a complete safetensors file: {why}")

    def _header(self) -> tuple[dict[str, Any], int]:
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, self._size - LENGTH_BYTES):
                raise self._broken(f"a header of {length} bytes does not fit into {self._size}")
            text = file.read(length)
        try:
            header = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._broken(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._broken("its header is not a JSON object")
        return header, LENGTH_BYTES + length

    def _parse(self) -> tuple[dict[str, str], dict[str, Entry]]:
        header, begin = self._header()
        metadata = header.pop("__metadata__", None) or {}
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._broken(f"its __metadata__ is {metadata!r}, not an object of strings")
        entries = sorted((self._entry(name, row, begin) for name, row in header.items()), key=lambda e: (e.start, e.stop))
        expected = begin
        for entry in entries:
            if entry.start != expected:
                raise self._broken(f"{entry.name} starts at byte {entry.start}, but the data before it ends at {expected}")
            if entry.stop > self._size:
                raise self._broken(f"{entry.name} ends at byte {entry.stop}, but the file has {self._size}")
            expected = entry.stop
        if expected != self._size:
            raise self._broken(f"{self._size - expected} bytes follow its last tensor")
        return metadata, {entry.name: entry for entry in entries}

    def _entry(self, name: str, row: Any, begin: int) -> Entry:
        try:
            dtype, shape, (start, stop) = row["dtype"], tuple(_size(n) for n in row["shape"]), map(_size, row["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._broken(f"the header's entry of {name} is not one: {error!r}") from error
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{self.path}: {name} is stored as {dtype}, which is unknown; known: {', '.join(DTYPES)}")
        if stop - start != nbytes_of(dtype, shape):
            raise self._broken(f"{name} has {stop - start} bytes for {dtype} {list(shape)}")
        return Entry(name, dtype, shape, begin + start, begin + stop)

    def tensor(self, name: str) -> Tensor:
        """The tensor as a view of the file (writing into it does not reach the file)."""
        entry = self.entries[name]
        dtype = DTYPES[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if self._map is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        if entry.start % dtype.itemsize:
            return torch.frombuffer(bytearray(self._map[entry.start : entry.stop]), dtype=dtype).reshape(entry.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start).reshape(entry.shape)


def header_bytes(rows: Sequence[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """Length and header of a file that holds `rows` (name, dtype, shape) in that order; padded to 8 bytes like the library's."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, dtype, shape in rows:
        stop = offset + nbytes_of(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes, without a copy when it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data
