"""The mean of several checkpoints of one model: all weights, added up in fp32, stored as the first one stores them.

The mean runs: m += (x - m) w / (w_1 + .. + w_k), so equal checkpoints give exactly themselves, whatever the weights. Memory:
three fp32 copies of the largest tensor (fp64 tensors are added up in fp64). An interrupted run goes on where it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from models.convert_staging import Report, Staging, Step, check_free_space, check_target, silent
from models.hf_io import INDEX, CheckpointReader, check_names, is_finite
from models.hf_write import TEMPLATE, TOKENIZER, TOKENIZER_CONFIG, VOCABULARIES, ShardFile, copy_companions, plan_of, read_json
from models.registry import read_spec


@dataclass(frozen=True)
class AverageOptions:
    """weights: of the sources, in their order; None counts all alike. fsync: on the disk before the result appears."""

    weights: tuple[float, ...] | None = None
    fsync: bool = True


def average(sources: Sequence[Path], target: Path, options: AverageOptions | None = None, report: Report = silent) -> None:
    """Write the mean of the Hugging Face folders `sources`; configuration, tokenizer and file layout are the first one's.

    ValueError naming folder and tensor when a source is another model, differs in a tensor's dtype or shape, holds NaN or has
    an integer tensor that is not the same in all; when only one has a tokenizer; when tokenizers or chat templates differ; when a
    folder is given twice; when the weights are not one positive number for each source.
    """
    options = options or AverageOptions()
    weights = _weights(sources, options.weights)
    _check_distinct(sources)
    check_target(target, *sources)
    readers = [CheckpointReader(folder) for folder in sources]
    for reader in readers[1:]:
        _check_same_model(readers[0], reader)
    plans = plan_of(readers[0])
    total = sum(plan.nbytes for plan in plans)
    done = 0
    with Staging(target, _fingerprint(readers, weights), fsync=options.fsync) as staging:
        check_free_space(staging.folder, total - sum(plan.nbytes for plan in plans if staging.has_file(plan.file)))
        for plan in plans:
            resumed = staging.has_file(plan.file)
            if not resumed:
                with ShardFile(staging.folder / plan.file, plan, fsync=staging.fsync) as file:
                    for slot in plan.slots:
                        file.put(slot.name, _mean(readers, slot.name, weights))
                    file.close()
                staging.finish_file(plan.file)
            done += plan.nbytes
            report(Step(plan.file, done, total, resumed))
        copy_companions(sources[0], staging.folder)
        index = sources[0] / INDEX
        if index.is_file():
            (staging.folder / INDEX).write_text(index.read_text(encoding="utf-8"), encoding="utf-8")
        staging.complete()


def _weights(sources: Sequence[Path], given: Sequence[float] | None) -> tuple[float, ...]:
    if len(sources) < 2:
        raise ValueError(f"average: {len(sources)} checkpoint; at least 2 are needed")
    weights = tuple(given) if given is not None else (1.0,) * len(sources)
    if len(weights) != len(sources):
        raise ValueError(f"average: {len(weights)} weights for {len(sources)} checkpoints; one for each is needed")
    wrong = [weight for weight in weights if not (math.isfinite(weight) and weight > 0.0)]
    if wrong:
        raise ValueError(f"average: weight {wrong[0]} is not a positive number")
    return weights


def _check_distinct(sources: Sequence[Path]) -> None:
    """A folder given twice would count twice; --weights says that openly."""
    seen: set[Path] = set()
    for source in sources:
        if source.resolve() in seen:
            raise ValueError(f"average: {source} is given twice; give it once, with a weight of its own")
        seen.add(source.resolve())


def _check_same_model(first: CheckpointReader, other: CheckpointReader) -> None:
    """The same tokenizer, tensors, architecture and settings."""
    _check_same_texts(first.folder, other.folder)
    check_names(other.stored_names(), first.stored_names(), other.folder)
    for name in sorted(first.stored_names()):
        mine, its = first.entry(name), other.entry(name)
        if (mine.dtype, mine.shape) != (its.dtype, its.shape):
            raise ValueError(
                f"{other.path_of(name)}: {name} is {its.dtype} {list(its.shape)}, "
                f"in {first.folder} it is {mine.dtype} {list(mine.shape)}"
            )
    if read_spec(first.folder) != read_spec(other.folder):
        raise ValueError(f"{other.folder}: its config.json is of another model than that of {first.folder}")


def _check_same_texts(first: Path, other: Path) -> None:
    """The same tokenizer and chat template. A tokenizer.json holds its vocabulary, so only one may have it apart as well.

    Only one may have a template: a base model has none.
    """
    whole = (first / TOKENIZER).is_file() and (other / TOKENIZER).is_file()
    for name in (TOKENIZER, *VOCABULARIES, TEMPLATE):
        files = [folder / name for folder in (first, other)]
        there = [path.is_file() for path in files]
        if any(there) and not all(there) and not (whole or name == TEMPLATE):
            raise ValueError(f"{files[there.index(False)]}: no such file, and {files[there.index(True)]} exists")
        if all(there) and files[0].read_bytes() != files[1].read_bytes():
            what = "chat template" if name == TEMPLATE else "tokenizer"
            why = "their prompts are different texts" if name == TEMPLATE else "their ids mean different texts"
            raise ValueError(f"{files[1]} is not the {what} of {first}: {why}")
    templates = [_template_of(folder / TOKENIZER_CONFIG) for folder in (first, other)]
    if None not in templates and templates[0] != templates[1]:
        raise ValueError(
            f"{other / TOKENIZER_CONFIG}: its chat_template is not that of {first}: their prompts are different texts"
        )


def _template_of(path: Path) -> object:
    """The chat template inside a tokenizer's configuration; None without one. ValueError naming a file that is no JSON object."""
    if not path.is_file():
        return None
    found = read_json(path)
    return found.get("chat_template") if isinstance(found, dict) else None


def _mean(readers: Sequence[CheckpointReader], name: str, weights: Sequence[float]) -> Tensor:
    first = _read(readers[0], name)
    if not first.is_floating_point():
        for reader in readers[1:]:
            if not torch.equal(first, _read(reader, name)):
                raise ValueError(f"{reader.path_of(name)}: {name} ({first.dtype}) is not the same as in {readers[0].folder}")
        return first
    wide = torch.float64 if first.dtype is torch.float64 else torch.float32
    # Fractions: a sum of two large weights is no infinity, and of two small ones not zero.
    mean, so_far = first.to(wide, copy=True), Fraction(weights[0])
    for reader, weight in zip(readers[1:], weights[1:], strict=True):
        so_far += Fraction(weight)
        _advance(mean, _read(reader, name), float(Fraction(weight) / so_far))
    mean = mean.to(first.dtype)
    if not is_finite(mean):
        raise ValueError(f"{readers[0].path_of(name)}: the mean of {name} is not finite in {first.dtype}, though every one is")
    return mean


def _advance(mean: Tensor, other: Tensor, share: float) -> None:
    """Go `share` of the way to `other`, in place."""
    difference = other.to(mean.dtype, copy=True).sub_(mean)
    if is_finite(difference):
        mean.add_(difference, alpha=share)
    else:
        mean.mul_(1.0 - share).add_(other.to(mean.dtype), alpha=share)


def _read(reader: CheckpointReader, name: str) -> Tensor:
    tensor = reader.read_stored(name)
    if tensor.is_floating_point():
        if tensor.dtype.itemsize == 1:
            raise ValueError(
                f"{reader.path_of(name)}: {name} is stored as {tensor.dtype}: take the checkpoint before quantisation"
            )
        if not is_finite(tensor):
            raise ValueError(f"{reader.path_of(name)}: {name} holds NaN or infinity")
    return tensor


def _fingerprint(readers: Sequence[CheckpointReader], weights: Sequence[float]) -> str:
    stamps = [
        [str(file.path.resolve()), file.path.stat().st_size, file.path.stat().st_mtime_ns]
        for reader in readers
        for file in reader.files
    ]
    return json.dumps(["average", stamps, list(weights)])
