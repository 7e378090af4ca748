"""A checkpoint of the same kind with the same tensors, cut anew.

Megatron's: pieces as the ranks of a tensor-parallel layout hold them, so that a rank reads its own bytes and no more (any
layout can load any cut; pipeline and expert ranks need none, since every layer is a file and every expert a piece).
Hugging Face's: files of another size.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from models.checkpoint_layout import Section, sections_of
from models.checkpoint_reader import MARKER, is_distributed_checkpoint
from models.convert_export import DecoderTensors, open_decoder
from models.convert_megatron import COMPANIONS, ImportOptions, check_cut, check_layout, write_megatron
from models.convert_staging import Report, Staging, Step, check_free_space, check_target, silent
from models.hf_io import INDEX, CheckpointReader, is_finite
from models.hf_write import FilePlan, ShardFile, copy_companions, index_text, plan_of, plan_shards
from models.weight_map import Rule


def reshard(source: Path, target: Path, options: ImportOptions, *, shard_bytes: int, report: Report = silent) -> None:
    """Write `source` again as `target`: Megatron's for options.tp and options.etp, Hugging Face's in files of shard_bytes.

    ValueError naming file and tensor when the source is damaged or does not divide.
    """
    check_target(target, source)
    if is_distributed_checkpoint(source):
        made = _MegatronSource(source)
        check_cut(made.decoder.rules, made.spec, options)
        with Staging(target, _fingerprint(source, options.tp, options.etp), fsync=options.fsync) as staging:
            write_megatron(made, made.decoder.rules, options, staging, report)
        return
    reader = CheckpointReader(source)
    plans = plan_shards((slot for plan in plan_of(reader) for slot in plan.slots), shard_bytes)
    with Staging(target, _fingerprint(source, shard_bytes), fsync=options.fsync) as staging:
        _reshard_hf(reader, plans, staging, report)


class _MegatronSource:
    """A Megatron checkpoint as `convert_megatron.Source`."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.decoder: DecoderTensors = open_decoder(folder, folder / COMPANIONS)
        self.spec = self.decoder.spec
        self._companions = folder / COMPANIONS
        check_layout(self._companions)

    def tensors(self, rule: Rule, sections: tuple[Section, ...]) -> Iterable[Tensor]:
        """Read section by section. ValueError naming file and tensor on NaN."""
        stored = sections_of(rule, self.spec, stacked=self.decoder.reader.stacked)
        return [self.decoder.piece(section, rule) for section in stored]

    def nbytes(self, rule: Rule) -> int:
        """Bytes of a parameter as stored."""
        (first, *_) = sections_of(rule, self.spec, stacked=self.decoder.reader.stacked)
        itemsize = self.decoder.reader.stored(first.key).dtype.itemsize
        return itemsize * sum(math.prod(tensor.shape) for tensor in rule.tensors)

    def companions_nbytes(self) -> int:
        """Bytes of the folder beside Megatron's files."""
        return sum(path.stat().st_size for path in self._companions.iterdir())

    def write_companions(self, folder: Path, *, fsync: bool) -> None:
        """Copy them (the staging folder is synchronised as a whole)."""
        shutil.copytree(self._companions, folder, dirs_exist_ok=True)


def _fingerprint(source: Path, *chosen: int) -> str:
    paths = [source / ".metadata", source / MARKER, *sorted(source.glob("*.safetensors")), source / INDEX]
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in paths if path.is_file()]
    return json.dumps(["reshard", str(source.resolve()), stamps, chosen])


def _undamaged(reader: CheckpointReader, name: str) -> Tensor:
    tensor = reader.read_stored(name)
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1 and not is_finite(tensor):
        raise ValueError(f"{reader.path_of(name)}: {name} holds NaN or infinity")
    return tensor


def _reshard_hf(reader: CheckpointReader, plans: tuple[FilePlan, ...], staging: Staging, report: Report) -> None:
    total = sum(plan.nbytes for plan in plans)
    check_free_space(staging.folder, total - sum(plan.nbytes for plan in plans if staging.has_file(plan.file)))
    done = 0
    for plan in plans:
        resumed = staging.has_file(plan.file)
        if not resumed:
            with ShardFile(staging.folder / plan.file, plan, fsync=staging.fsync) as file:
                for slot in plan.slots:
                    file.put(slot.name, _undamaged(reader, slot.name))
                file.close()
            staging.finish_file(plan.file)
        done += plan.nbytes
        report(Step(plan.file, done, total, resumed))
    copy_companions(reader.folder, staging.folder)
    index = index_text(plans)
    if index is not None:
        (staging.folder / INDEX).write_text(index, encoding="utf-8")
    staging.complete()
