"""Megatron distributed checkpoint -> Hugging Face folder, streamed: one output file after the other, no Megatron needed.

Reads any torch_dist checkpoint of a supported model, whatever layout wrote it. Configuration, tokenizer, carried tensors
and the layout of the files come from the checkpoint's own `hugging_face/` folder, or from a reference folder.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.checkpoint_items import digest_of
from models.checkpoint_layout import Section, sections_of
from models.checkpoint_reader import MARKER, MegatronReader, check_stored, stored_digests
from models.convert_carried import TIED_HEAD, read_config, with_dtype
from models.convert_megatron import CARRIED_FILE, COMPANIONS, LAYOUT_FILE, check_layout
from models.convert_staging import Report, Staging, Step, check_free_space, check_target, silent
from models.convert_text_only import text_only_config, text_only_plans
from models.hf_file import DTYPE_NAMES, DTYPES, SafetensorsFile
from models.hf_io import INDEX, SINGLE, CheckpointReader, checked, expert_parts, is_finite
from models.hf_write import FilePlan, ShardFile, Slot, copy_companions, index_text, plan_of, plan_shards
from models.mapping import FuseGateUp, VocabRows
from models.registry import read_spec, weight_map
from models.spec import ModelSpec
from models.weight_map import Rule

_KEPT_RULES = 4


@dataclass(frozen=True)
class ExportOptions:
    """reference: folder to take configuration and file layout from; None is the checkpoint's own hugging_face/.

    text_only: the decoder alone, under its own architecture. fsync: everything is on the disk before the result appears.
    """

    reference: Path | None = None
    text_only: bool = False
    fsync: bool = True


class DecoderTensors:
    """Hugging Face tensors of the decoder, made from a Megatron checkpoint one parameter at a time."""

    def __init__(self, reader: MegatronReader, spec: ModelSpec) -> None:
        """Check that the checkpoint holds just the model's tensors. ValueError naming the tensor otherwise."""
        self.reader, self.spec = reader, spec
        self.rules = tuple(rule for rule in weight_map(spec) if rule.exported)
        self._sections = {rule.megatron: sections_of(rule, spec, stacked=reader.stacked) for rule in self.rules}
        padded = frozenset(s.key for r in self.rules if isinstance(r.op, VocabRows) for s in self._sections[r.megatron])
        check_stored(reader, [section for sections in self._sections.values() for section in sections], padded)
        self._where = {t.name: (rule, number) for rule in self.rules for number, t in enumerate(rule.tensors)}
        self._recent: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()
        self.names = frozenset(self._where)

    def slot(self, name: str) -> Slot:
        """Dtype and shape of a tensor, as the checkpoint stores it."""
        rule, number = self._where[name]
        stored = self.reader.stored(self._sections[rule.megatron][0].key)
        return Slot(name, DTYPE_NAMES[stored.dtype], rule.tensors[number].shape)

    def read(self, name: str) -> Tensor:
        """The tensor; to be copied and not to be changed. ValueError naming file and tensor when it holds NaN."""
        rule, number = self._where[name]
        return self.parts(rule)[number]

    def parts(self, rule: Rule) -> tuple[Tensor, ...]:
        """All Hugging Face tensors of a parameter, the last few kept."""
        if rule.megatron in self._recent:
            self._recent.move_to_end(rule.megatron)
            return self._recent[rule.megatron]
        made = self._make(rule)
        self._recent[rule.megatron] = made
        if len(self._recent) > _KEPT_RULES:
            self._recent.popitem(last=False)
        return made

    def _make(self, rule: Rule) -> tuple[Tensor, ...]:
        pieces = [self.piece(section, rule) for section in self._sections[rule.megatron]]
        if isinstance(rule.op, FuseGateUp):
            return tuple(pieces)
        return rule.op.split(pieces[0] if len(pieces) == 1 else torch.cat(pieces))

    def piece(self, section: Section, rule: Rule) -> Tensor:
        """A stored section, without the vocabulary's padding. ValueError naming file and tensor on NaN."""
        piece = self.reader.read(section)
        if isinstance(rule.op, VocabRows):
            if piece.shape[0] < rule.op.vocab_size:
                path = self.reader.path_of(section.key)
                raise ValueError(f"{path}: {section.key} has {piece.shape[0]} rows, the vocabulary has {rule.op.vocab_size}")
            piece = piece[: rule.op.vocab_size]
        if not is_finite(piece):
            raise ValueError(f"{self.reader.path_of(section.key)}: {section.key} holds NaN or infinity at {list(section.offset)}")
        return piece


def open_decoder(folder: Path, reference: Path, *, check_digests: bool = True) -> DecoderTensors:
    """The decoder of the checkpoint `folder`, whose config.json is in `reference`. ValueError naming what does not fit."""
    reader = MegatronReader(folder, stored_digests(folder) if check_digests else None)
    if not reference.is_dir():
        raise ValueError(f"{reference} does not exist: this checkpoint needs a reference folder with its config.json")
    return DecoderTensors(reader, read_spec(reference))


class CheckpointSource:
    """Where the parts of the result come from: the checkpoint, and the folder with configuration and carried tensors."""

    def __init__(self, folder: Path, options: ExportOptions, *, check_digests: bool = True) -> None:
        self.reference = options.reference or folder / COMPANIONS
        self.tensors = open_decoder(folder, self.reference, check_digests=check_digests)
        self.spec = self.tensors.spec
        if check_digests:
            check_layout(self.reference)
        stored = (self.reference / INDEX).is_file() or (self.reference / SINGLE).is_file()
        self._folder = CheckpointReader(self.reference) if stored else None
        carried = self.reference / CARRIED_FILE
        self._carried = SafetensorsFile(carried) if self._folder is None and carried.is_file() else None
        self._check_digests, self._carried_digests = check_digests, dict[str, str]()
        self.plans, self.index = self._plan()

    def _plan(self) -> tuple[tuple[FilePlan, ...], str | None]:
        """The files to write, and the index's text when they are just those it is about."""
        layout = self.reference / LAYOUT_FILE
        index: str | None = None
        if self._folder is not None:
            plans = plan_of(self._folder)
            path = self.reference / INDEX
            index = path.read_text(encoding="utf-8") if path.is_file() else None
        elif layout.is_file():
            plans, index, self._carried_digests = _read_layout(layout)
        else:
            plans = plan_shards(self.tensors.slot(t.name) for rule in self.tensors.rules for t in rule.tensors)
        ours = tuple(replace(plan, slots=tuple(self._as_stored(slot) for slot in plan.slots)) for plan in plans)
        self.dtypes_differ = ours != plans
        return ours, index_text(ours) if self.dtypes_differ else index

    def _as_stored(self, slot: Slot) -> Slot:
        """The slot in the dtype that the checkpoint holds."""
        name = self.decoder_parts(slot)
        return slot if name is None else replace(slot, dtype=self.tensors.slot(name[0]).dtype)

    def decoder_parts(self, slot: Slot) -> list[str] | None:
        """Names of the decoder tensors that fill the slot, in order; None for a carried tensor."""
        known = self.tensors.names
        if slot.name in known:
            return [slot.name]
        parts = [name for name, _ in expert_parts(slot.name, slot.shape[0] if slot.shape else 0)]
        if parts and known.issuperset(parts):
            return parts
        if slot.name == TIED_HEAD and self.spec.tied_embeddings:
            return [f"{self.spec.text_prefix}embed_tokens.weight"]
        return None

    def pieces(self, slot: Slot) -> Iterator[Tensor]:
        """The tensor's rows in order. ValueError naming a tensor that is nowhere."""
        parts = self.decoder_parts(slot)
        if parts is not None:
            yield from (self.tensors.read(name) for name in parts)
        elif self._folder is not None:
            yield checked(self._folder.read_stored(slot.name), slot.name, self._folder.path_of(slot.name))
        elif self._carried is not None and slot.name in self._carried.entries:
            yield self._carried_tensor(self._carried, slot.name)
        else:
            raise ValueError(f"{self.reference} lacks the tensor {slot.name}")

    def _carried_tensor(self, file: SafetensorsFile, name: str) -> Tensor:
        tensor, written = file.tensor(name), self._carried_digests.get(name)
        if self._check_digests and written is not None and digest_of(tensor) != written:
            found = f"its digest is {digest_of(tensor)}, {LAYOUT_FILE} says {written}"
            raise ValueError(f"{file.path}: {name} is not what was written: {found}")
        return checked(tensor, name, file.path)


def _read_layout(path: Path) -> tuple[tuple[FilePlan, ...], str | None, dict[str, str]]:
    """Files, the index's text, digests of the carried tensors. ValueError naming the file when it does not hold them."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_plan_from(row) for row in stored["files"]), stored["index"], dict(stored.get("carried", {}))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} does not hold the layout of a Hugging Face folder: {error!r}") from error


def _plan_from(row: Sequence[Any]) -> FilePlan:
    file, metadata, slots = row
    return FilePlan(file, tuple(Slot(name, dtype, tuple(shape)) for name, dtype, shape in slots), metadata)


def megatron_to_hf(source: Path, target: Path, options: ExportOptions, report: Report = silent) -> None:
    """Convert the checkpoint `source`; `target` appears when it is complete, and an interrupted conversion goes on.

    ValueError naming file and tensor when the source is damaged or does not match the configuration.
    """
    check_target(target, source)
    made = CheckpointSource(source, options)
    _check_complete(made)
    renamed: dict[str, str] = {}
    plans, index = made.plans, made.index
    if options.text_only:
        plans, renamed = text_only_plans(plans, made.spec, made.decoder_parts)
        index = index_text(plans)
    with Staging(target, _fingerprint(source, made.reference, options), fsync=options.fsync) as staging:
        copy_companions(made.reference, staging.folder)
        _write_files(made, plans, renamed, staging, report)
        (staging.folder / LAYOUT_FILE).unlink(missing_ok=True)
        _write_config(made, staging.folder, text_only=options.text_only)
        if index is not None:
            (staging.folder / INDEX).write_text(index, encoding="utf-8")
        staging.complete()


def _write_config(made: CheckpointSource, folder: Path, *, text_only: bool) -> None:
    """Nothing to do when the reference's own says how the tensors are stored."""
    own = read_config(made.reference)
    config = own
    if made.dtypes_differ:
        common = Counter(made.tensors.slot(name).dtype for name in made.tensors.names).most_common(1)[0][0]
        config = with_dtype(own, str(DTYPES[common]).removeprefix("torch."))
    if text_only:
        config = text_only_config(config, made.spec)
    if config is not own:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _check_complete(made: CheckpointSource) -> None:
    """Every decoder tensor has a place in the plan; a reference folder may be of another model."""
    slots = (slot for plan in made.plans for slot in plan.slots)
    planned = {name for slot in slots for name in made.decoder_parts(slot) or ()}
    missing = sorted(made.tensors.names - planned)
    if missing:
        raise ValueError(f"{made.reference} has no place for {missing[0]}, which the checkpoint holds")


def _fingerprint(source: Path, reference: Path, options: ExportOptions) -> str:
    plans = (INDEX, LAYOUT_FILE)
    of_reference = [path for path in sorted(reference.iterdir()) if path.suffix == ".safetensors" or path.name in plans]
    files = (source / ".metadata", source / MARKER, *of_reference)
    stamps = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    config = (reference / "config.json").read_text(encoding="utf-8")
    return json.dumps(["export", str(source.resolve()), str(reference.resolve()), stamps, config, options.text_only])


def _write_files(
    made: CheckpointSource, plans: tuple[FilePlan, ...], renamed: dict[str, str], staging: Staging, report: Report
) -> None:
    total = sum(plan.nbytes for plan in plans)
    check_free_space(staging.folder, total - sum(plan.nbytes for plan in plans if staging.has_file(plan.file)))
    done = 0
    for plan in plans:
        resumed = staging.has_file(plan.file)
        if not resumed:
            with ShardFile(staging.folder / plan.file, plan, fsync=staging.fsync) as file:
                for slot in plan.slots:
                    for piece in made.pieces(replace(slot, name=renamed.get(slot.name, slot.name))):
                        file.put(slot.name, piece)
                file.close()
            staging.finish_file(plan.file)
        done += plan.nbytes
        report(Step(plan.file, done, total, resumed))
