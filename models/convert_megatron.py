"""Writing a Megatron checkpoint unit by unit, from whatever the parameters come from: see `Source`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from models.checkpoint_items import digest_of_file
from models.checkpoint_layout import Section, extra_state_keys, layers_alike, sections_of
from models.checkpoint_reader import OWN_FILE, place_name
from models.checkpoint_writer import Item, finish_checkpoint, write_items
from models.convert_staging import Report, Staging, Step, check_free_space, sync_path
from models.spec import ModelSpec
from models.weight_map import Rule

COMPANIONS = "hugging_face"
CARRIED_FILE = "carried.safetensors"
LAYOUT_FILE = "layout.json"
LAYOUT_DIGEST = "layout"
VERSION = 2


@dataclass(frozen=True)
class ImportOptions:
    """tp, etp: tensor-parallel sizes the stored pieces are cut for (any size can load them). mtp: keep or drop.

    fsync: everything is on the disk before the result appears.
    """

    tp: int = 1
    etp: int = 1
    mtp: str = "keep"
    fsync: bool = True


class Source(Protocol):
    """Where a checkpoint's parameters and the files beside them come from."""

    @property
    def name(self) -> str:
        """What the checkpoint says it was made from."""
        ...

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        ...

    def tensors(self, rule: Rule, sections: tuple[Section, ...]) -> Iterable[Tensor]:
        """One tensor per section; a vocabulary's rows may be fewer than the section has."""
        ...

    def nbytes(self, rule: Rule) -> int:
        """Bytes of a parameter."""
        ...

    def companions_nbytes(self) -> int:
        """Bytes of the tensors that are only carried."""
        ...

    def write_companions(self, folder: Path, *, fsync: bool) -> None:
        """Fill the folder with configuration, tokenizer, carried tensors and the layout of the files."""
        ...


def units_of(rules: Iterable[Rule]) -> tuple[tuple[str, tuple[Rule, ...]], ...]:
    """Rules by the unit they are written in: before the layers, every layer, after the layers."""
    groups = groupby(rules, key=lambda rule: rule.place.value if rule.layer is None else f"layer {rule.layer}")
    return tuple((name, tuple(group)) for name, group in groups)


def check_cut(rules: Iterable[Rule], spec: ModelSpec, options: ImportOptions) -> None:
    """ValueError naming the number and the tensor when the sizes that the pieces are cut for do not divide the model."""
    for rule in rules:
        key, ranks = ("tp", options.tp) if rule.expert is None else ("etp", options.etp)
        for section in sections_of(rule, spec, stacked=layers_alike(spec), tp=options.tp) if ranks > 1 else ():
            if section.axis is not None and section.shape[section.axis] % ranks:
                size = section.shape[section.axis]
                raise ValueError(
                    f"{key}={ranks}: {section.key}: dimension {section.axis} of {list(section.shape)} does not divide into "
                    f"{ranks} pieces; a divisor of {size} is needed"
                )


class _Writer:
    def __init__(self, source: Source, rules: tuple[Rule, ...], options: ImportOptions, staging: Staging) -> None:
        self.source, self.rules, self.options, self.staging = source, rules, options, staging
        self.units = units_of(rules)
        self.sizes = {name: sum(source.nbytes(rule) for rule in unit) for name, unit in self.units}
        self.total = sum(self.sizes.values()) + source.companions_nbytes()
        self.done = 0

    def _sections(self, rules: Iterable[Rule]) -> Iterator[tuple[Section, Tensor, int]]:
        spec, options = self.source.spec, self.options
        for rule in rules:
            ranks = options.tp if rule.expert is None else options.etp
            sections = sections_of(rule, spec, stacked=layers_alike(spec), tp=options.tp)
            for section, tensor in zip(sections, self.source.tensors(rule, sections), strict=True):
                yield section, tensor, ranks

    def advance(self, unit: str, nbytes: int, report: Report, make: Callable[[], Any]) -> Any:
        """What the unit's record is: that of an interrupted build, or a new one."""
        resumed = unit in self.staging.done
        if not resumed:
            self.staging.finish(unit, make())
        self.done += nbytes
        report(Step(unit, self.done, self.total, resumed))
        return self.staging.done[unit]

    def run(self, report: Report) -> list[Item]:
        """Write every unit that is not there yet."""
        paths = {unit: self.staging.folder / f"__{number}_0.distcp" for number, (unit, _) in enumerate(self.units)}
        for unit, path in paths.items():
            if unit in self.staging.done and not _complete(path, self.staging.done[unit]):
                del self.staging.done[unit]
        ready = sum(self.sizes[unit] for unit in paths if unit in self.staging.done)
        check_free_space(self.staging.folder, self.total - ready)
        self.advance("carried", self.source.companions_nbytes(), report, self._write_companions)
        items: list[Item] = []
        for unit, rules in self.units:
            rows = self.advance(unit, self.sizes[unit], report, lambda p=paths[unit], r=rules: self._write(p, r))
            items += [Item.from_json(row) for row in rows]
        return items

    def _write(self, path: Path, rules: tuple[Rule, ...]) -> list[list[Any]]:
        return [item.to_json() for item in write_items(path, self._sections(rules), fsync=self.options.fsync)]

    def _write_companions(self) -> None:
        folder = self.staging.folder / COMPANIONS
        folder.mkdir(exist_ok=True)
        self.source.write_companions(folder, fsync=self.options.fsync)
        for path in folder.rglob("*") if self.options.fsync else ():
            sync_path(path)


def write_megatron(source: Source, rules: tuple[Rule, ...], options: ImportOptions, staging: Staging, report: Report) -> None:
    """Write the checkpoint and give it its name."""
    items = _Writer(source, rules, options, staging).run(report)
    layout = staging.folder / COMPANIONS / LAYOUT_FILE
    about = _description(source, options, items) | ({LAYOUT_DIGEST: digest_of_file(layout)} if layout.is_file() else {})
    (staging.folder / OWN_FILE).write_text(json.dumps(about), encoding="utf-8")
    finish_checkpoint(staging.folder, items, extra_state_keys(rules, source.spec), fsync=options.fsync)
    staging.complete()


def _complete(path: Path, rows: list[list[Any]]) -> bool:
    end = max(item.start + item.length for item in map(Item.from_json, rows))
    return path.is_file() and path.stat().st_size == end


def layout_fault(companions: Path) -> str | None:
    """What is wrong with the file layout in a checkpoint's hugging_face/ folder, by the digest in the file above it.

    None as well where there is no layout, or nothing above it: a Hugging Face folder, or a checkpoint without any digest.
    """
    layout, own = companions / LAYOUT_FILE, companions.absolute().parent / OWN_FILE
    if not layout.is_file() or not own.is_file():
        return None
    try:
        written = json.loads(own.read_text(encoding="utf-8")).get(LAYOUT_DIGEST)
    except (ValueError, AttributeError, RecursionError) as error:
        return f"{own} does not hold the checkpoint's digests: {error!r}"
    if written is None:
        return f"{layout} cannot be checked: {own}, of an older version, has no digest of it; convert the source again"
    found = digest_of_file(layout)
    return None if found == written else f"{layout} is not what was written: its digest is {found}, {OWN_FILE} says {written}"


def check_layout(companions: Path) -> None:
    """ValueError naming the file when `layout_fault` finds something."""
    fault = layout_fault(companions)
    if fault is not None:
        raise ValueError(fault)


def _description(source: Source, options: ImportOptions, items: Iterable[Item]) -> dict[str, Any]:
    """What the format itself has no place for: where it comes from, and a digest of every stored piece."""
    digests: dict[str, dict[str, str]] = {}
    for item in items:
        digests.setdefault(item.key, {})[place_name(item.offset)] = item.digest
    about = {"version": VERSION, "architecture": source.spec.architecture, "source": source.name}
    return {**about, "tp": options.tp, "etp": options.etp, "digests": digests}
