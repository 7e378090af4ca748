"""Hugging Face safetensors folders, streamed in and out one tensor at a time. No Megatron, no process group.

Experts may be stored one by one (`experts.3.gate_proj.weight`, what transformers saves) or fused into 3-D tensors
(`experts.gate_up_proj` [E, 2F, H], `experts.down_proj` [E, H, F], what transformers 5 keeps in memory). Readers always
see them one by one; writers write what the source folder had.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 4 * 1024**3
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf", ".pth", ".pt")
_FUSED = re.compile(r"^(.*\.experts)\.(gate_up_proj|down_proj)$")
_ONE_EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


class CheckpointReader:
    """Tensors of a folder by name. Every error is a ValueError that names the file, and the tensor where there is one."""

    def __init__(self, folder: Path) -> None:
        """Read the headers; data is read by `read`."""
        self.folder = folder
        self._open: dict[Path, Any] = {}
        self._file_of = self._locate()
        self._experts = {alias: name for name in self._file_of for alias in self._aliases(name)}

    def _locate(self) -> dict[str, Path]:
        index, single = self.folder / INDEX, self.folder / SINGLE
        if not index.is_file():
            if not single.is_file():
                raise ValueError(f"{self.folder} holds neither {SINGLE} nor {INDEX}")
            return dict.fromkeys(self._handle(single).keys(), single)
        try:
            stored: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (json.JSONDecodeError, KeyError) as error:
            raise ValueError(f"{index} is not a safetensors index: {error!r}") from error
        located = {name: self.folder / file for name, file in stored.items()}
        for path in sorted(set(located.values())):
            promised, found = {n for n, p in located.items() if p == path}, set(self._handle(path).keys())
            if promised != found:
                raise ValueError(f"{path} and {INDEX} disagree about {_some(promised ^ found)}")
        return located

    def _handle(self, path: Path) -> Any:
        if path not in self._open:
            if not path.is_file():
                raise ValueError(f"{path} is missing, but {INDEX} lists it")
            try:
                self._open[path] = safe_open(str(path), framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{path} is not a complete safetensors file: {error}") from error
        return self._open[path]

    def _header(self, name: str) -> Any:
        return self._handle(self._file_of[name]).get_slice(name)

    def _aliases(self, name: str) -> Iterator[str]:
        fused = _FUSED.match(name)
        if fused is None:
            return
        parts = ("gate_proj", "up_proj") if fused[2] == "gate_up_proj" else ("down_proj",)
        for expert in range(self._header(name).get_shape()[0]):
            yield from (f"{fused[1]}.{expert}.{part}.weight" for part in parts)

    def stored_names(self) -> frozenset[str]:
        """All tensors under the names they are stored by: fused experts as one."""
        return frozenset(self._file_of)

    def is_fused(self, name: str) -> bool:
        """True when the expert's tensor is stored as a part of a 3-D one."""
        return name in self._experts

    def read_stored(self, name: str) -> Tensor:
        """The tensor under a name of `stored_names`, whatever its dtype and values."""
        if name not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        try:
            return self._handle(self._file_of[name]).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self._file_of[name]}: {name} cannot be read: {error}") from error

    @property
    def fused_experts(self) -> bool:
        """True when experts are stored as 3-D tensors."""
        return bool(self._experts)

    def names(self) -> frozenset[str]:
        """All tensors, experts one by one."""
        return frozenset(name for name in self._file_of if _FUSED.match(name) is None) | frozenset(self._experts)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored; ValueError for one we do not train in."""
        stored = self._stored(name)
        text = self._header(stored).get_dtype()
        if text not in _DTYPES:
            raise ValueError(f"{self._file_of[stored]}: {name} is stored as {text}; known: {', '.join(_DTYPES)}")
        return _DTYPES[text]

    def _stored(self, name: str) -> str:
        stored = self._experts.get(name, name)
        if stored not in self._file_of:
            raise ValueError(f"{self.folder} has no tensor {name}")
        return stored

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU. NaN and infinity are refused."""
        stored = self._stored(name)
        path = self._file_of[stored]
        try:
            tensor = self._read_expert(name, stored) if stored != name else self._handle(path).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path}: {name} cannot be read: {error}") from error
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{path}: {name} holds NaN or infinity")
        return tensor

    def _read_expert(self, name: str, stored: str) -> Tensor:
        match = _ONE_EXPERT.match(name)
        if match is None:
            raise ValueError(f"{name} is not the name of an expert's tensor")
        whole = self._header(stored)[int(match[2])]
        if match[3] == "down_proj":
            return whole
        return whole.chunk(2)[0 if match[3] == "gate_proj" else 1].contiguous()


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def check_names(found: frozenset[str], expected: frozenset[str], where: Path) -> None:
    """ValueError naming the tensors that are missing from, or unexpected in, a checkpoint."""
    missing, extra = expected - found, found - expected
    if missing:
        raise ValueError(f"{where} lacks {len(missing)} tensors of the model: {_some(missing)}")
    if extra:
        raise ValueError(f"{where} holds {len(extra)} tensors that the model does not have: {_some(extra)}")


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
        raise ValueError(f"not all {num_experts} experts were given for {_some(pending)}")


def _fused(prefix: str, group: dict[tuple[int, str], Tensor], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    rows = [torch.cat([group[expert, "gate_proj"], group[expert, "up_proj"]]) for expert in range(num_experts)]
    yield f"{prefix}.gate_up_proj", torch.stack(rows)
    yield f"{prefix}.down_proj", torch.stack([group[expert, "down_proj"] for expert in range(num_experts)])


def write_checkpoint(
    target: Path, tensors: Iterable[tuple[str, Tensor]], *, source: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write `tensors` as a folder, beside the source's other files (config, tokenizer, generation config) untouched.

    Atomic: everything is written into a temporary folder beside `target`, which is renamed when it is complete.
    ValueError when `target` exists or a tensor comes twice.
    """
    if target.exists():
        raise ValueError(f"{target} already exists; a checkpoint is never written over another one")
    staging = target.with_name(f".{target.name}.incomplete")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _copy_companions(source, staging)
    _write_shards(staging, tensors, max_shard_bytes)
    staging.rename(target)


def _copy_companions(source: Path, staging: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copy2(path, staging / path.name)


def _write_shards(staging: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total, seen = 0, set[str]()

    def flush() -> None:
        if held:
            save_file(held, str(staging / f"part-{len(shards)}"), metadata={"format": "pt"})
            shards.append(list(held))
            held.clear()

    for name, tensor in tensors:
        if name in seen:
            raise ValueError(f"tensor {name} was given twice")
        if held and sum(t.nbytes for t in held.values()) + tensor.nbytes > max_shard_bytes:
            flush()
        seen.add(name)
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        total += tensor.nbytes
    flush()
    _name_shards(staging, shards, total)


def _name_shards(staging: Path, shards: list[list[str]], total_bytes: int) -> None:
    if len(shards) == 1:
        (staging / "part-0").rename(staging / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (staging / f"part-{number}").rename(staging / file)
        where.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": where}
    (staging / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
