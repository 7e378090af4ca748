"""What is in a checkpoint, Hugging Face's or Megatron's: names, shapes, dtypes, files, and digests on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from models.checkpoint_items import digest_of
from models.checkpoint_reader import MegatronReader, is_distributed_checkpoint
from models.convert_megatron import COMPANIONS
from models.hf_file import DTYPE_NAMES, DTYPES
from models.hf_io import CheckpointReader
from models.registry import load_config


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor. pieces: how many chunks it is stored in; digest: xxh3-64 of its bytes (of its chunks' digests)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    files: tuple[str, ...]
    pieces: int
    digest: str | None = None


@dataclass(frozen=True)
class Inspection:
    """kind: hugging_face or megatron. objects beside tensors are not listed."""

    folder: str
    kind: str
    architecture: str | None
    tensors: tuple[TensorInfo, ...]

    @property
    def elements(self) -> int:
        """Numbers in all tensors, padding included."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def to_json(self) -> dict[str, Any]:
        """Builtins only."""
        return {**asdict(self), "elements": self.elements, "nbytes": self.nbytes}

    def text(self) -> str:
        """A table and a summary."""
        wide = max((len(tensor.name) for tensor in self.tensors), default=4)
        lines = [f"{t.name:<{wide}}  {t.dtype:<5} {_shape(t):<22} {_where(t)}  {t.digest or ''}".rstrip() for t in self.tensors]
        dtypes = Counter(t.dtype for t in self.tensors)
        kinds = ", ".join(f"{count} {dtype}" for dtype, count in sorted(dtypes.items()))
        about = f"{self.folder}: {self.kind}, {self.architecture or 'architecture unknown'}"
        files = len({file for t in self.tensors for file in t.files})
        sizes = f"{len(self.tensors)} tensors ({kinds}), {self.elements:,} numbers, {self.nbytes / 1e9:.3f} GB in {files} files"
        return "\n".join([*lines, about, sizes, ""])


def _shape(tensor: TensorInfo) -> str:
    return "x".join(str(n) for n in tensor.shape) or "scalar"


def _where(tensor: TensorInfo) -> str:
    files = tensor.files[0] + (f" and {len(tensor.files) - 1} more" if len(tensor.files) > 1 else "")
    return f"{files} ({tensor.pieces} pieces)" if tensor.pieces > 1 else files


def inspect_checkpoint(folder: Path, *, digests: bool = False) -> Inspection:
    """Look at a folder of either kind. ValueError naming what is damaged, or when it is neither."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    if is_distributed_checkpoint(folder):
        tensors = _megatron(MegatronReader(folder), digests=digests)
        return Inspection(str(folder), "megatron", _architecture(folder / COMPANIONS), tuple(tensors))
    return Inspection(str(folder), "hugging_face", _architecture(folder), tuple(_hf(CheckpointReader(folder), digests=digests)))


def _architecture(folder: Path) -> str | None:
    path = folder / "config.json"
    if not path.is_file():
        return None
    names = load_config(path).get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _hf(reader: CheckpointReader, *, digests: bool) -> Iterable[TensorInfo]:
    for name in sorted(reader.stored_names()):
        entry = reader.entry(name)
        digest = digest_of(reader.read_stored(name)) if digests else None
        file = reader.path_of(name).name
        yield TensorInfo(name, entry.dtype, entry.shape, entry.stop - entry.start, (file,), 1, digest)


def _megatron(reader: MegatronReader, *, digests: bool) -> Iterable[TensorInfo]:
    for key, stored in sorted(reader.tensors.items()):
        digest = None
        if digests:
            parts = [digest_of(reader.chunk(stored, chunk)) for chunk in sorted(stored.chunks, key=lambda c: c.offset)]
            joined = torch.frombuffer(bytearray("".join(parts), "ascii"), dtype=torch.uint8)
            digest = parts[0] if len(parts) == 1 else digest_of(joined)
        dtype = DTYPE_NAMES[stored.dtype]
        nbytes = math.prod(stored.shape) * DTYPES[dtype].itemsize
        files = tuple(sorted({chunk.file for chunk in stored.chunks}))
        yield TensorInfo(key, dtype, stored.shape, nbytes, files, len(stored.chunks), digest)
