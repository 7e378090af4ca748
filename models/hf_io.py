"""Hugging Face safetensors folders, read one tensor at a time. No Megatron, no process group. `models.hf_write` writes them.

Experts may be stored one by one (`experts.3.gate_proj.weight`, what transformers saves) or fused into 3-D tensors
(`experts.gate_up_proj` [E, 2F, H], `experts.down_proj` [E, H, F], what transformers 5 keeps in memory). Readers see them
one by one; writers write what the source folder had.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.hf_file import Entry, SafetensorsFile

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FUSED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_ONE_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_TRAINED = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def is_finite(tensor: Tensor) -> bool:
    """No NaN and no infinity in a floating-point tensor; one pass, no copy (NaN wins every comparison of aminmax)."""
    if tensor.numel() == 0:
        return True
    return all(math.isfinite(extreme.item()) for extreme in torch.aminmax(tensor))


def checked(tensor: Tensor, name: str, path: Path) -> Tensor:
    """The tensor. ValueError naming file and tensor when it holds NaN or infinity or is quantised (a float of one byte)."""
    if tensor.is_floating_point():
        if tensor.dtype.itemsize == 1:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise ValueError(f"{path}: {name} is {kind}: quantised checkpoints are not supported")
        if not is_finite(tensor):
            raise ValueError(f"{path}: {name} holds NaN or infinity")
    return tensor


@dataclass(frozen=True)
class ExpertPart:
    """Where one expert's tensor lies inside a fused one. name: the fused tensor's; part: gate_proj, up_proj or down_proj."""

    name: str
    expert: int
    part: str

    def of(self, fused: Tensor) -> Tensor:
        """The expert's tensor, a view: gate is the first half of its rows, up the second."""
        whole = fused[self.expert]
        if self.part == "down_proj":
            return whole
        return whole.chunk(2)[0 if self.part == "gate_proj" else 1]


def expert_parts(name: str, num_experts: int) -> Iterator[tuple[str, ExpertPart]]:
    """Names of the experts' tensors that the fused tensor `name` holds; none when it is not one."""
    fused = _FUSED.match(name)
    if fused is None:
        return
    parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
    for expert in range(num_experts):
        yield from ((f"{fused[1]}.{expert}.{part}.weight", ExpertPart(name, expert, part)) for part in parts)


class CheckpointReader:
    """Tensors of a folder by name. Every error is a ValueError that names the file, and the tensor where there is one."""

    def __init__(self, folder: Path) -> None:
        """Read the headers; data is read by `read`."""
        self.folder = folder
        self.files = self._open()
        if not any(file.entries for file in self.files):
            raise ValueError(f"{', '.join(str(file.path) for file in self.files)} holds no tensor")
        self._file_of = {name: file for file in self.files for name in file.entries}
        self._experts = {
            alias: part
            for file in self.files
            for name, entry in file.entries.items()
            for alias, part in expert_parts(name, entry.shape[0] if entry.shape else 0)
        }
        twice = sorted(self._experts.keys() & self._file_of.keys())
        if twice:
            raise ValueError(f"{folder} stores {twice[0]} twice: on its own and inside {self._experts[twice[0]].name}")

    def _open(self) -> tuple[SafetensorsFile, ...]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not index.is_file():
            if not single.is_file():
                raise ValueError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")
            return (SafetensorsFile(single),)
        try:
            stored: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            promised: dict[str, set[str]] = {}
            for name, file in stored.items():
                promised.setdefault(file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
        if not stored:
            raise ValueError(f"{index}: weight_map is empty, so there is no tensor")
        wrong = [file for file in promised if not isinstance(file, str)]
        if wrong:
            raise ValueError(f"{index}: weight_map has {wrong[0]!r} for {some(promised[wrong[0]])}, which is no file name")
        return tuple(self._open_listed(file, names) for file, names in sorted(promised.items()))

    def _open_listed(self, name: str, promised: set[str]) -> SafetensorsFile:
        path = self.folder / name
        if Path(name).name != name:
            raise ValueError(f"{self.folder / INDEX} lists {name!r}, which is not a file of this folder")
        if not path.is_file():
            raise ValueError(f"{path} is missing, but {INDEX} lists it")
        file = SafetensorsFile(path)
        if promised != file.entries.keys():
            raise ValueError(f"{path} and {INDEX} disagree about {some(promised ^ file.entries.keys())}")
        return file

    def _stored(self, name: str) -> str:
        stored = self._experts[name].name if name in self._experts else name
        if stored not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return stored

    @property
    def fused_experts(self) -> bool:
        """True when experts are stored as 3-D tensors."""
        return bool(self._experts)

    def names(self) -> frozenset[str]:
        """All tensors, experts one by one."""
        return frozenset(name for name in self._file_of if _FUSED.match(name) is None) | frozenset(self._experts)

    def stored_names(self) -> frozenset[str]:
        """All tensors under the names they are stored by: fused experts as one."""
        return frozenset(self._file_of)

    def is_fused(self, name: str) -> bool:
        """True when the expert's tensor is stored as a part of a 3-D one."""
        return name in self._experts

    def path_of(self, name: str) -> Path:
        """The file that holds the tensor."""
        return self._file_of[self._stored(name)].path

    def entry(self, name: str) -> Entry:
        """What the header says about the stored tensor that is, or holds, `name`."""
        stored = self._stored(name)
        return self._file_of[stored].entries[stored]

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored; ValueError for one we do not train in."""
        stored = self._stored(name)
        text = self._file_of[stored].entries[stored].dtype
        if text.startswith("F8"):
            raise ValueError(
                f"{self.path_of(name)}: {name} is stored as {text}: quantised checkpoints are refused, take the bf16 original"
            )
        if text not in _TRAINED:
            raise ValueError(f"{self.path_of(name)}: {name} is stored as {text}; known: {', '.join(_TRAINED)}")
        return _TRAINED[text]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a name of `names`."""
        return tuple(self._view(name).shape)

    def _view(self, name: str) -> Tensor:
        stored = self._stored(name)
        whole = self._file_of[stored].tensor(stored)
        return self._experts[name].of(whole) if name in self._experts else whole

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU: a view of the mapped file, to be copied and not to be changed. No NaN, no infinity."""
        return checked(self._view(name), name, self.path_of(name))

    def read_stored(self, name: str) -> Tensor:
        """The tensor under a name of `stored_names`, whatever its dtype and values; a view of the mapped file."""
        if name not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return self._file_of[name].tensor(name)


def some(names: Iterable[str]) -> str:
    """The first names in order, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def check_names(found: frozenset[str], expected: frozenset[str], where: Path) -> None:
    """ValueError naming the tensors that are missing from, or unexpected in, a checkpoint."""
    missing, extra = expected - found, found - expected
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} tensors of the model: {some(missing)}")
    if extra:
        raise ValueError(f"{where} holds {len(extra)} tensors that the model does not have: {some(extra)}")


def fuse_experts(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Per-expert tensors -> fused 3-D ones; holds one layer's experts at a time. ValueError when some are missing."""
    pending: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors:
        match = _ONE_EXPERT.match(name)
        if match is None:
            yield name, tensor
            continue
        group = pending.setdefault(match[1], {})
        group[int(match[2]), match[3]] = tensor.clone()
        if len(group) == 3 * num_experts:
            yield from _fused(match[1], pending.pop(match[1]), num_experts)
    if pending:
        raise ValueError(f"not all {num_experts} experts were given for {some(pending)}")


def _fused(prefix: str, group: dict[tuple[int, str], Tensor], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    rows = [torch.cat([group[expert, "gate_proj"], group[expert, "up_proj"]]) for expert in range(num_experts)]
    yield f"{prefix}.gate_up_proj", torch.stack(rows)
    yield f"{prefix}.down_proj", torch.stack([group[expert, "down_proj"] for expert in range(num_experts)])
