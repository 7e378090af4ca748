"""A Megatron distributed checkpoint (torch_dist), written one decoder layer at a time without Megatron and without ranks.

Megatron's own save needs the whole state first. Here each layer is a file of its own, written from tensors as they come;
`.metadata` ties the files together, and `metadata.json`, which makes the folder a checkpoint, comes last.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from models.checkpoint_items import digest_of, write_item
from models.checkpoint_layout import Section
from models.checkpoint_reader import BACKEND, COMMON, MARKER
from models.hf_file import DTYPE_NAMES, DTYPES

OBJECTS_FILE = "__objects_0.distcp"


@dataclass(frozen=True)
class Item:
    """One stored chunk: key and dtype of its tensor, the tensor's shape, the chunk's place in it and in its file."""

    key: str
    dtype: str
    of: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    start: int
    length: int
    digest: str

    def to_json(self) -> list[Any]:
        """Builtins only."""
        return list(vars(self).values())

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Item:
        """`to_json` reversed."""
        return cls(row[0], row[1], tuple(row[2]), tuple(row[3]), tuple(row[4]), *row[5:])


def cut(section: Section, tensor: Tensor, ranks: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """The pieces of `ranks` tensor-parallel ranks, each with its place in the stored tensor.

    ValueError when the section does not divide. A vocabulary is filled up with rows of zeros.
    """
    short = section.shape[0] - tensor.shape[0]
    if short > 0:
        tensor = torch.cat([tensor, tensor.new_zeros(short, *tensor.shape[1:])])
    if section.axis is None or ranks == 1:
        yield section.offset, tensor.contiguous()
        return
    if section.shape[section.axis] % ranks:
        raise ValueError(f"{section.key}: dimension {section.axis} of {list(section.shape)} does not divide into {ranks}")
    at = list(section.offset)
    for piece in tensor.chunk(ranks, section.axis):
        yield tuple(at), piece.contiguous()
        at[len(section.lead) + section.axis] += piece.shape[section.axis]


def write_items(path: Path, sections: Iterable[tuple[Section, Tensor, int]], *, fsync: bool) -> list[Item]:
    """Write sections (each cut for that many ranks) into one file, as they come."""
    items: list[Item] = []
    with path.open("wb", buffering=0) as stream:
        start = 0
        for section, tensor, ranks in sections:
            for offset, piece in cut(section, tensor, ranks):
                shape = (*(1 for _ in section.lead), *piece.shape)
                length = write_item(stream, piece.reshape(shape))
                dtype, digest = DTYPE_NAMES[piece.dtype], digest_of(piece)
                items.append(Item(section.key, dtype, section.global_shape, offset, shape, path.name, start, length, digest))
                start += length
        if fsync:
            os.fsync(stream.fileno())
    return items


def _tensor_metadata(items: Sequence[Item]) -> dict[str, Any]:
    chunks: dict[str, list[Item]] = {}
    for item in items:
        chunks.setdefault(item.key, []).append(item)
    return {
        key: TensorStorageMetadata(
            properties=TensorProperties(dtype=DTYPES[parts[0].dtype]),
            size=torch.Size(parts[0].of),
            chunks=[ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)) for part in parts],
        )
        for key, parts in chunks.items()
    }


def finish_checkpoint(folder: Path, items: Sequence[Item], objects: Iterable[str], *, fsync: bool) -> None:
    """Tie the files together: `.metadata`, the common state (empty), and last the marker.

    objects: keys of the empty objects, which all lie at one place.
    """
    with (folder / OBJECTS_FILE).open("wb") as stream:
        torch.save([None], stream)
        nothing = (0, stream.tell())
    names = list(objects)
    results = [WriteResult(MetadataIndex(i.key, i.offset), i.length, _StorageInfo(i.file, i.start, i.length)) for i in items] + [
        WriteResult(MetadataIndex(name), nothing[1], _StorageInfo(OBJECTS_FILE, *nothing)) for name in names
    ]
    described = _tensor_metadata(items) | {name: BytesStorageMetadata() for name in names}
    writer = FileSystemWriter(folder, sync_files=fsync)
    writer.finish(Metadata(state_dict_metadata=described), [results])
    torch.save({}, folder / COMMON)
    marker = {"sharded_backend": BACKEND, "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
    (folder / MARKER).write_text(json.dumps(marker), encoding="utf-8")
