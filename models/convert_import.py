"""Hugging Face folder -> Megatron distributed checkpoint, streamed: one decoder layer after the other, no Megatron needed.

Beside Megatron's files the result holds `hugging_face/`: the source's configuration and tokenizer, the tensors that are
only carried, and how the source laid its files out, so that the way back gives the same files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from models.checkpoint_items import digest_of
from models.checkpoint_layout import Section, sections_of
from models.convert_carried import Carried, carried_tensors, decoder_names
from models.convert_megatron import CARRIED_FILE, LAYOUT_FILE, VERSION, ImportOptions, check_cut, write_megatron
from models.convert_staging import Report, Staging, check_target, silent
from models.hf_io import INDEX, CheckpointReader, check_names, checked
from models.hf_write import FilePlan, ShardFile, Slot, copy_companions, plan_of
from models.mapping import FuseGateUp, check_shapes
from models.registry import read_spec, weight_map
from models.spec import ModelSpec
from models.weight_map import Rule


def hf_to_megatron(source: Path, target: Path, options: ImportOptions, report: Report = silent) -> None:
    """Convert the folder `source`; `target` appears when it is complete, and an interrupted conversion goes on.

    ValueError naming file and tensor when the source is damaged, does not match its configuration, or does not fit.
    """
    check_target(target, source)
    made = HuggingFaceSource(source, options.mtp)
    check_cut(made.rules, made.spec, options)
    with Staging(target, _fingerprint(made.reader, options), fsync=options.fsync) as staging:
        write_megatron(made, made.rules, options, staging, report)


class HuggingFaceSource:
    """A checked Hugging Face folder as `convert_megatron.Source`."""

    def __init__(self, folder: Path, mtp: str) -> None:
        """Read the headers. ValueError naming a tensor that is missing, unexpected, or not as the configuration says."""
        self.name = folder.name
        self.spec = read_spec(folder)
        self.reader = CheckpointReader(folder)
        self.rules = tuple(rule for rule in weight_map(self.spec) if rule.exported)
        self.carried = carried_tensors(self.reader, self.spec, mtp)
        check_source(self.reader, self.spec, self.rules, self.carried)
        entries = [self.reader.entry(name) for name in self.carried.names]
        self._plan = FilePlan(CARRIED_FILE, tuple(Slot(e.name, e.dtype, e.shape) for e in entries))

    def tensors(self, rule: Rule, sections: tuple[Section, ...]) -> Iterable[Tensor]:
        """One tensor per section; gate and up need no copy. ValueError naming file and tensor on NaN."""
        parts = [self.reader.read(tensor.name) for tensor in rule.tensors]
        if isinstance(rule.op, FuseGateUp):
            check_shapes(parts, rule.op.shapes)
            return parts
        whole = rule.op.fuse(parts)
        return [whole[section.rows[0] : section.rows[1]] for section in sections]

    def nbytes(self, rule: Rule) -> int:
        """Bytes of a parameter as stored."""
        return sum(math.prod(tensor.shape) * self.reader.dtype(tensor.name).itemsize for tensor in rule.tensors)

    def companions_nbytes(self) -> int:
        """Bytes of the carried tensors."""
        return self._plan.nbytes

    def write_companions(self, folder: Path, *, fsync: bool) -> None:
        """Copy the small files, the carried tensors bit by bit, and write down the layout with those tensors' digests."""
        digests: dict[str, str] = {}
        copy_companions(self.reader.folder, folder)
        if self.carried.config is not None:
            (folder / "config.json").write_text(self.carried.config, encoding="utf-8")
        if self._plan.slots:
            with ShardFile(folder / CARRIED_FILE, self._plan, fsync=fsync) as file:
                for slot in self._plan.slots:
                    tensor = checked(self.reader.read_stored(slot.name), slot.name, self.reader.path_of(slot.name))
                    file.put(slot.name, tensor)
                    digests[slot.name] = digest_of(tensor)
                file.close()
        (folder / LAYOUT_FILE).write_text(json.dumps({**self._layout(), "carried": digests}), encoding="utf-8")

    def _layout(self) -> dict[str, object]:
        """Files, their tensors in order, and the index's text when all of them are there."""
        dropped, index = set(self.carried.dropped), self.reader.folder / INDEX
        plans = [FilePlan(p.file, tuple(s for s in p.slots if s.name not in dropped), p.metadata) for p in plan_of(self.reader)]
        files = [[p.file, dict(p.metadata), [[s.name, s.dtype, s.shape] for s in p.slots]] for p in plans if p.slots]
        return {"files": files, "index": index.read_text(encoding="utf-8") if index.is_file() and not dropped else None}


def check_source(reader: CheckpointReader, spec: ModelSpec, rules: Iterable[Rule], carried: Carried) -> None:
    """ValueError naming a tensor that is missing, unexpected, of another shape, or of another dtype than its kind."""
    rules = tuple(rules)
    check_names(decoder_names(reader, spec, carried), frozenset(t.name for rule in rules for t in rule.tensors), reader.folder)
    first: dict[str, str] = {}
    for rule in rules:
        for tensor in rule.tensors:
            shape = reader.shape(tensor.name)
            if shape != tensor.shape:
                file, wanted = reader.path_of(tensor.name), list(tensor.shape)
                raise ValueError(f"{file}: {tensor.name} is {list(shape)}, but {reader.folder / 'config.json'} makes it {wanted}")
            kind = first.setdefault(sections_of(rule, spec, stacked=True)[0].key, tensor.name)
            if reader.dtype(tensor.name) is not reader.dtype(kind):
                one, other = reader.dtype(kind), reader.dtype(tensor.name)
                raise ValueError(f"{reader.path_of(tensor.name)}: {tensor.name} is {other}, but {kind}, stored with it, is {one}")


def _fingerprint(reader: CheckpointReader, options: ImportOptions) -> str:
    files = [(file.path.name, file.path.stat().st_size, file.path.stat().st_mtime_ns) for file in reader.files]
    config = (reader.folder / "config.json").read_text(encoding="utf-8")
    return json.dumps(["import", VERSION, str(reader.folder.resolve()), files, config, options.tp, options.etp, options.mtp])
