"""Hugging Face safetensors folders, written: headers are planned first, so that tensors go straight to their place.

A folder appears under its name only when it is complete: everything is written into a hidden folder beside it, which is
renamed at the end.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from models.hf_file import DTYPE_NAMES, header_bytes, nbytes_of, raw_bytes
from models.hf_io import INDEX, SINGLE, CheckpointReader, some
from models.spec import TensorMeta

MAX_SHARD_BYTES = 4 * 1024**3
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
VOCABULARIES = ("vocab.json", "merges.txt", "tokenizer.model")
TOKENIZER_FILES = (TOKENIZER, TOKENIZER_CONFIG, TEMPLATE, *VOCABULARIES, "special_tokens_map.json", "added_tokens.json")
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pth", ".pt")
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class Slot:
    """One tensor of a file to write. dtype as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return nbytes_of(self.dtype, self.shape)


@dataclass(frozen=True)
class FilePlan:
    """One file to write: its name, its tensors in the order of their data, the header's own metadata."""

    file: str
    slots: tuple[Slot, ...]
    metadata: Mapping[str, str] = field(default_factory=lambda: dict(_METADATA))

    def header(self) -> bytes:
        """What stands before the data."""
        return header_bytes([(slot.name, slot.dtype, slot.shape) for slot in self.slots], dict(self.metadata))

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(slot.nbytes for slot in self.slots)


def slot_of(meta: TensorMeta) -> Slot:
    """The slot of a tensor; ValueError naming one whose dtype safetensors does not know."""
    if meta.dtype not in DTYPE_NAMES:
        raise ValueError(f"{meta.name} is {meta.dtype}, which safetensors cannot store")
    return Slot(meta.name, DTYPE_NAMES[meta.dtype], tuple(meta.shape))


def plan_of(reader: CheckpointReader) -> tuple[FilePlan, ...]:
    """The plan that writes a folder exactly as it is."""
    return tuple(
        FilePlan(file.path.name, tuple(Slot(e.name, e.dtype, e.shape) for e in file.entries.values()), file.metadata)
        for file in reader.files
    )


def plan_shards(slots: Iterable[Slot], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[FilePlan, ...]:
    """Slots in order, in files of at most max_shard_bytes (one tensor may be larger): one file, or numbered shards."""
    shards: list[list[Slot]] = [[]]
    held = 0
    for slot in slots:
        if shards[-1] and held + slot.nbytes > max_shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(slot)
        held += slot.nbytes
    if len(shards) == 1:
        return (FilePlan(SINGLE, tuple(shards[0])),)
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    return tuple(FilePlan(name, tuple(shard)) for name, shard in zip(names, shards, strict=True))


def index_text(plans: Sequence[FilePlan]) -> str | None:
    """What the index says about the files; None when there is only one, under the name that needs no index."""
    if len(plans) == 1 and plans[0].file == SINGLE:
        return None
    where = {slot.name: plan.file for plan in plans for slot in plan.slots}
    index = {"metadata": {"total_size": sum(plan.nbytes for plan in plans)}, "weight_map": where}
    return json.dumps(index, indent=2) + "\n"


class ShardFile:
    """One file being written; its tensors may come in any order, and a tensor in pieces. Use it as a context manager."""

    def __init__(self, path: Path, plan: FilePlan, *, fsync: bool = False) -> None:
        """Write the header."""
        header = plan.header()
        self._path, self._fsync = path, fsync
        self._slots = {slot.name: slot for slot in plan.slots}
        self._next: dict[str, int] = {}
        self._stop: dict[str, int] = {}
        offset = len(header)
        for slot in plan.slots:
            self._next[slot.name], offset = offset, offset + slot.nbytes
            self._stop[slot.name] = offset
        self._file: BinaryIO = path.open("wb", buffering=0)
        self._at = 0
        self._write(header, 0)

    def __enter__(self) -> ShardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        if offset != self._at:
            self._file.seek(offset)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._at = offset + len(data)

    def put(self, name: str, piece: Tensor) -> None:
        """The next piece of the tensor `name`: all of it, or its next rows. ValueError when it does not fit its slot."""
        slot, data = self._slots[name], raw_bytes(piece)
        if DTYPE_NAMES[piece.dtype] != slot.dtype:
            raise ValueError(f"{name} is {DTYPE_NAMES[piece.dtype]}, but {slot.dtype} was planned")
        if self._next[name] + len(data) > self._stop[name]:
            raise ValueError(f"{name} was given {len(data)} bytes more than {list(slot.shape)} has, or was given twice")
        self._write(data, self._next[name])
        self._next[name] += len(data)

    def close(self) -> None:
        """ValueError naming the tensors that were not given."""
        missing = [name for name in self._slots if self._next[name] != self._stop[name]]
        if missing:
            raise ValueError(f"{self._path.name} lacks {some(missing)}: they were not given, or not whole")
        if self._fsync:
            os.fsync(self._file.fileno())
        self._file.close()


def copy_companions(source: Path, target: Path) -> None:
    """Everything in the folder but weights and their indexes: configuration, tokenizer, generation settings.

    ValueError naming a link that leads nowhere, as in a folder that was not downloaded whole, or JSON that is none.
    """
    for path in sorted(source.iterdir()):
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} is a link to {path.readlink()}, which does not exist")
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            if path.suffix == ".json":
                read_json(path)
            shutil.copy2(path, target / path.name)


def read_json(path: Path) -> Any:
    """What a JSON file beside the weights holds. ValueError naming the file when it is none."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {str(error)[:200]}") from error


def write_checkpoint(
    target: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    source: Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    metas: Sequence[TensorMeta] | None = None,
) -> None:
    """Write `tensors` as a folder, beside the source's other files (config, tokenizer, generation config) untouched.

    metas: name, dtype and shape of every tensor; with them nothing is held in memory, and a source with the same tensors
    is written file by file as it was. Without them up to max_shard_bytes are held.
    ValueError when `target` exists, a tensor comes twice, or one that `metas` promises does not come.
    """
    if target.exists():
        raise ValueError(f"{target} already exists; a checkpoint is never written over another one")
    staging = target.with_name(f".{target.name}.incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    copy_companions(source, staging)
    if metas is None:
        plans = _write_held(staging, tensors, max_shard_bytes)
    else:
        plans = planned_like(source, [slot_of(meta) for meta in metas], max_shard_bytes)
        _write_planned(staging, tensors, plans)
    index = index_text(plans)
    if index is not None:
        (staging / INDEX).write_text(index, encoding="utf-8")
    staging.rename(target)


def planned_like(source: Path, slots: Sequence[Slot], max_shard_bytes: int = MAX_SHARD_BYTES) -> tuple[FilePlan, ...]:
    """The source folder's own plan when it stores just these tensors, in these dtypes; new shards otherwise."""
    with suppress(ValueError):  # a source may be a folder without weights
        own = plan_of(CheckpointReader(source))
        if {slot for plan in own for slot in plan.slots} == set(slots):
            return own
    return plan_shards(slots, max_shard_bytes)


def _write_planned(staging: Path, tensors: Iterable[tuple[str, Tensor]], plans: Sequence[FilePlan]) -> None:
    files = [ShardFile(staging / plan.file, plan) for plan in plans]
    where = {slot.name: file for plan, file in zip(plans, files, strict=True) for slot in plan.slots}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} was given twice")
        if name not in where:
            raise ValueError(f"tensor {name} was not planned")
        seen.add(name)
        where[name].put(name, tensor)
    for file in files:
        file.close()


def _write_held(staging: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> tuple[FilePlan, ...]:
    slots: list[Slot] = []
    for number, held in enumerate(_held(tensors, max_shard_bytes)):
        shard = tuple(slot_of(TensorMeta(name, t.dtype, tuple(t.shape))) for name, t in held.items())
        slots += shard
        with ShardFile(staging / f"part-{number}", FilePlan("", shard)) as file:
            for name, tensor in held.items():
                file.put(name, tensor)
            file.close()
    plans = plan_shards(slots, max_shard_bytes)
    for number, plan in enumerate(plans):
        (staging / f"part-{number}").rename(staging / plan.file)
    return plans


def _held(tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Copies of the tensors, as many at a time as fit into one shard (`plan_shards` cuts at the same places)."""
    held: dict[str, Tensor] = {}
    seen: set[str] = set()
    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} was given twice")
        seen.add(name)
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > max_shard_bytes:
            yield held
            held = {}
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
    if held or not seen:
        yield held
