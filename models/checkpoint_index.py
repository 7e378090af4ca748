"""`.metadata` of a Megatron distributed checkpoint: which tensors it holds, and which bytes of which file are theirs.

It is a pickle, read as torch's own reader does: read checkpoints of people you trust. A damaged one is a ValueError; what a
pickle with a flipped bit can raise is listed in FAULTS.
"""

from __future__ import annotations

import math
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from models.checkpoint_items import BROKEN_PICKLE

METADATA = ".metadata"
NOT_WEIGHTS = ("optimizer.", "chained_", "rng_state", "common_state", "rerun_state_machine_state")
FAULTS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BROKEN_PICKLE,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
_FRAME_BYTES = 9
_LONGEST_NAME_BYTES = 255
_NUMBERED = ("PUT", "BINPUT", "LONG_BINPUT")


@dataclass(frozen=True)
class Chunk:
    """A block of a stored tensor: where it begins in the tensor, its shape, and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    place: tuple[int, int]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the checkpoint and its chunks."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class Piece:
    """What a run of bytes of a file belongs to: a block of a tensor that begins at offset, or an object (None)."""

    key: str
    offset: tuple[int, ...] | None
    file: str
    place: tuple[int, int]


@dataclass(frozen=True)
class Index:
    """Tensors by key, and all pieces, those of objects too."""

    tensors: dict[str, StoredTensor]
    pieces: tuple[Piece, ...]


def read_index(folder: Path) -> Index:
    """The index of the checkpoint in `folder`. ValueError naming `.metadata`, and the tensor where there is one."""
    path = folder / METADATA
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        _check_lengths(path.read_bytes())
        return _plain(FileSystemReader(folder).read_metadata())
    except FAULTS as error:
        raise ValueError(f"{path} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}") from error


def _check_lengths(data: bytes) -> None:
    """A frame or a number in the memo that is too large makes the unpickler ask for as much memory, gigabytes for one bit."""
    for opcode, argument, position in pickletools.genops(data):
        if opcode.name == "FRAME" and int(argument or 0) + (position or 0) + _FRAME_BYTES > len(data):
            raise ValueError(f"a frame of {argument} bytes at {position} in {len(data)} bytes")
        if opcode.name in _NUMBERED and int(argument or 0) > len(data):
            raise ValueError(f"number {argument} in the memo of {len(data)} bytes")


def _plain(metadata: Metadata) -> Index:
    """Builtins out of what was unpickled, each of the type that the rest relies on."""
    stored: dict[Any, Any] = metadata.storage_data or {}
    pieces = tuple(_piece(index, info) for index, info in stored.items())
    places = {(piece.key, piece.offset): piece for piece in pieces}
    tensors = {
        _text(key): _tensor(key, value, places)
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    return Index(tensors, pieces)


def _piece(index: Any, info: Any) -> Piece:
    name = _text(info.relative_path)
    file = Path(name)
    if file.is_absolute() or ".." in file.parts or "\0" in name or not 0 < len(name.encode()) < _LONGEST_NAME_BYTES:
        raise ValueError(f"{index.fqn} lies in {name!r}, which is not a file of this folder")
    offset = None if index.offset is None else _sizes(index.offset)
    start, length = _sizes((info.offset, info.length))
    return Piece(_text(index.fqn), offset, name, (start, length))


def _tensor(key: str, stored: TensorStorageMetadata, places: dict[tuple[str, tuple[int, ...] | None], Piece]) -> StoredTensor:
    shape, dtype = _sizes(stored.size), stored.properties.dtype
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{key} has the dtype {dtype!r}")
    chunks: list[Chunk] = []
    for block in stored.chunks:
        offset, sizes = _sizes(block.offsets), _sizes(block.sizes)
        if any(start + size > whole for start, size, whole in zip(offset, sizes, shape, strict=True)):
            raise ValueError(f"{key}: the chunk {list(sizes)} at {list(offset)} lies outside of {list(shape)}")
        piece = places.get((key, offset))
        if piece is None:
            raise ValueError(f"{key} has no data at {list(offset)}")
        chunks.append(Chunk(offset, sizes, piece.file, piece.place))
    held, whole = sum(math.prod(chunk.shape) for chunk in chunks), math.prod(shape)
    if not key.startswith(NOT_WEIGHTS) and (held != whole or not chunks):
        raise ValueError(f"{key}: its chunks hold {held} of {whole} elements")
    return StoredTensor(key, dtype, shape, tuple(chunks))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a name")
    return value


def _sizes(values: Iterable[Any]) -> tuple[int, ...]:
    found = tuple(values)
    if not all(type(value) is int and value >= 0 for value in found):
        raise TypeError(f"{found!r} are not sizes")
    return found
