"""A Megatron distributed checkpoint (torch_dist), read tensor by tensor, whatever layout wrote it. No Megatron, no ranks.

Only `.metadata` is unpickled (models/checkpoint_index.py).
"""

from __future__ import annotations

import json
import lzma
import os
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import torch
from torch import Tensor

from models.checkpoint_index import FAULTS, NOT_WEIGHTS, Chunk, Piece, StoredTensor, read_index
from models.checkpoint_items import ItemFile, digest_of
from models.checkpoint_layout import Section
from models.hf_io import some

MARKER = "metadata.json"
BACKEND = "torch_dist"
COMMON = "common.pt"
COMMON_OBJECT = "common_state/"
OWN_FILE = "mcore_rl.json"
BROKEN_ARCHIVE = (
    ArithmeticError,
    BadZipFile,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    ValueError,
    lzma.LZMAError,
    struct.error,
    zlib.error,
)
"""What zipfile raises for a damaged archive: also for names that are no text, seeks to nowhere and an encryption bit."""
_END_BYTES, _MOST_COUNTED = 22, 0xFFFF
_NUMBERED_LAYER = re.compile(r"^decoder\.layers\.\d+\.")


def is_distributed_checkpoint(folder: Path) -> bool:
    """True for a complete Megatron checkpoint: its marker is the last file to be written."""
    return (folder / MARKER).is_file()


def _backend(folder: Path) -> str:
    try:
        return str(json.loads((folder / MARKER).read_text(encoding="utf-8"))["sharded_backend"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / MARKER} does not describe a Megatron checkpoint: {error!r}") from error


Digests = Mapping[str, Mapping[str, str]]


def place_name(offset: tuple[int, ...]) -> str:
    """How a piece's place is written beside its digest."""
    return ",".join(str(n) for n in offset)


def stored_digests(folder: Path) -> Digests | None:
    """Key -> place -> digest of every piece as it was written; None for a checkpoint that Megatron saved, which has none."""
    path = folder / OWN_FILE
    if not path.is_file():
        return None
    try:
        digests = json.loads(path.read_text(encoding="utf-8"))["digests"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} does not hold the checkpoint's digests: {error!r}") from error
    if not isinstance(digests, dict) or not all(isinstance(pieces, dict) for pieces in digests.values()):
        raise ValueError(f"{path}: digests is not an object of objects, one for every tensor")
    return digests


class MegatronReader:
    """Tensors of a checkpoint by key. Every error is a ValueError naming the file, and the tensor where there is one."""

    def __init__(self, folder: Path, digests: Digests | None = None) -> None:
        """Read the metadata and check that the files are as long as it says. digests: compared with every piece that is read."""
        self.folder = folder
        self._digests = digests
        if not is_distributed_checkpoint(folder):
            raise ValueError(f"{folder} is not a complete Megatron checkpoint: it has no {MARKER}")
        if _backend(folder) != BACKEND:
            raise ValueError(f"{folder / MARKER}: sharded_backend = {_backend(folder)!r} is not supported; {BACKEND!r} is")
        index = read_index(folder)
        self.tensors = index.tensors
        self._files: dict[str, ItemFile] = {}
        self._check_files(index.pieces)
        self._at = {(t.key, chunk.offset): chunk for t in self.tensors.values() for chunk in t.chunks}

    def _check_files(self, pieces: Sequence[Piece]) -> None:
        """Those of objects as well, and the common state: Megatron loads nothing without them.

        Up to 0.16 it is a file of its own, since then an object among the others.
        """
        sizes: dict[str, int] = {}
        for piece in pieces:
            path = self.folder / piece.file
            if piece.file not in sizes:
                if not path.is_file():
                    raise ValueError(f"{path} is missing; it holds {piece.key}")
                sizes[piece.file] = path.stat().st_size
            end = sum(piece.place)
            if end > sizes[piece.file]:
                raise ValueError(f"{path} is truncated: {piece.key} ends at byte {end} of {sizes[piece.file]}")
        common = self.folder / COMMON
        if common.is_file():
            _check_archive(common)
        elif not any(piece.key.startswith(COMMON_OBJECT) for piece in pieces):
            raise ValueError(f"{common} is missing: Megatron loads no checkpoint without its common state")

    def weights(self) -> frozenset[str]:
        """Keys of the model's own tensors: no optimizer states."""
        return frozenset(key for key in self.tensors if not key.startswith(NOT_WEIGHTS))

    @property
    def stacked(self) -> bool:
        """True when the layers of one kind of parameter are one tensor, False when the layer's number is in the key."""
        return not any(_NUMBERED_LAYER.match(key) for key in self.tensors)

    def stored(self, key: str) -> StoredTensor:
        """The tensor's description; ValueError when there is none."""
        if key not in self.tensors:
            raise ValueError(f"{self.folder} lacks the tensor {key}")
        return self.tensors[key]

    def path_of(self, key: str) -> Path:
        """A file that holds a part of the tensor."""
        return self.folder / self.stored(key).chunks[0].file

    def chunk(self, tensor: StoredTensor, chunk: Chunk) -> Tensor:
        """The chunk's tensor: a view of the mapped file where it can be."""
        try:
            if chunk.file not in self._files:
                self._files[chunk.file] = ItemFile(self.folder / chunk.file)
            piece = self._files[chunk.file].read(chunk.place, tensor.dtype, chunk.shape)
        except FAULTS as error:  # bytes of something else, where the index is wrong, fail in torch.load in any of these ways
            said = error if isinstance(error, ValueError) else f"{self.folder / chunk.file}: {error!r}"
            raise ValueError(f"{tensor.key}: {said}") from error
        if self._digests is not None:
            self._check_digest(self._digests, tensor, chunk, piece)
        return piece

    def _check_digest(self, digests: Digests, tensor: StoredTensor, chunk: Chunk, piece: Tensor) -> None:
        written, found = digests.get(tensor.key, {}).get(place_name(chunk.offset)), digest_of(piece)
        if written != found:
            where = f"{self.folder / chunk.file}: {tensor.key} at {list(chunk.offset)}"
            raise ValueError(f"{where} is not what was written: its digest is {found}, {OWN_FILE} says {written}")

    def read(self, section: Section) -> Tensor:
        """A section of a parameter, [*section.shape]; fewer rows when the checkpoint pads its vocabulary less.

        A view of the mapped file when one chunk holds just that. ValueError naming what is missing or does not fit.
        """
        tensor = self.stored(section.key)
        exact = self._at.get((section.key, section.offset))
        if exact is not None and exact.shape == (*(1 for _ in section.lead), *section.shape):
            return self.chunk(tensor, exact).reshape(section.shape)
        return self._assemble(tensor, section)

    def _assemble(self, tensor: StoredTensor, section: Section) -> Tensor:
        start = section.offset
        shape = (*(1 for _ in section.lead), *section.shape)
        stop = tuple(min(a + n, limit) for a, n, limit in zip(start, shape, tensor.shape, strict=True))
        wanted = tuple(b - a for a, b in zip(start, stop, strict=True))
        whole = torch.empty(wanted, dtype=tensor.dtype)
        filled = 0
        for chunk in tensor.chunks:
            low = tuple(max(a, b) for a, b in zip(start, chunk.offset, strict=True))
            high = tuple(min(a, b + n) for a, b, n in zip(stop, chunk.offset, chunk.shape, strict=True))
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            part = self.chunk(tensor, chunk)[_slices(low, high, chunk.offset)]
            whole[_slices(low, high, start)].copy_(part)
            filled += part.numel()
        if filled != whole.numel():
            raise ValueError(
                f"{self.folder}: the chunks of {tensor.key} hold {filled} of {whole.numel()} elements at {list(start)}"
            )
        return whole.reshape(wanted[len(section.lead) :])


def _check_archive(path: Path) -> None:
    """ValueError unless every member of torch's zip archive has the checksum it was written with. Nothing is unpickled."""
    try:
        with ZipFile(path) as archive:
            damaged, found = archive.testzip(), len(archive.infolist())
        promised = _promised_members(path)
    except BROKEN_ARCHIVE as error:
        raise ValueError(f"{path} is no file of torch.save: {error}; Megatron loads no checkpoint without it") from error
    if damaged:
        raise ValueError(f"{path} is damaged: {damaged} does not have its checksum")
    if min(found, _MOST_COUNTED) != promised:
        raise ValueError(f"{path} is damaged: {found} members are listed where {promised} were written")


def _promised_members(path: Path) -> int:
    """The count in the archive's last record, which zipfile does not compare: a damaged length can hide the members behind it."""
    with path.open("rb") as file:
        file.seek(-_END_BYTES, os.SEEK_END)
        end = file.read()
    if not end.startswith(b"PK\5\6"):
        raise BadZipFile("its last record is not at its end")
    return int.from_bytes(end[10:12], "little")


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def check_stored(reader: MegatronReader, sections: Sequence[Section], padded: frozenset[str]) -> None:
    """ValueError naming the key when tensors are missing, unexpected, or of another shape than the model's.

    padded: keys whose first dimension may be longer or shorter than ours (vocabularies).
    """
    shapes = {section.key: section.global_shape for section in sections}
    missing, extra = shapes.keys() - reader.tensors.keys(), reader.weights() - shapes.keys()
    if missing:
        raise ValueError(f"{reader.folder} lacks {len(missing)} tensors of the model: {some(missing)}")
    if extra:
        raise ValueError(f"{reader.folder} holds {len(extra)} tensors that the model does not have: {some(extra)}")
    for key, shape in shapes.items():
        found = reader.tensors[key].shape
        if found != shape and not (key in padded and found[1:] == shape[1:]):
            raise ValueError(f"{reader.path_of(key)}: {key} is {list(found)}, but the configuration says {list(shape)}")
