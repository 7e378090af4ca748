"""band.jsonl: the training prompts that are sometimes right, written by the pass-rate probe, read by training.

First line: the conditions (`Band`). Then one line per prompt: question, answer, how many of its samples were correct.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from mcore_rl.data.records import read_record
from mcore_rl.telemetry.jsonl import dump_line, read_texts

BAND_FORMAT = 1
FIRST_ROW_LINE = 2


@dataclass(frozen=True)
class Conditions:
    """What a pass rate depends on. Two probes, or a probe and a training run, are comparable when these are equal.

    rendering_sha256: of one rendered question (chat template, system prompt, suffix). model_digest: of the weights.
    """

    task: str
    seed: int
    extraction: str
    rendering_sha256: str
    model_digest: str
    samples: int
    temperature: float
    max_tokens: int


@dataclass(frozen=True)
class BandRow:
    """One prompt of the band. pass_rate: correct / samples."""

    prompt_id: str
    question: str
    answer: str
    samples: int
    correct: int


@dataclass(frozen=True)
class Band:
    """The band with where it comes from. probed, mixed: prompts that were probed, and those with both verdicts."""

    conditions: Conditions
    low: float
    high: float
    probed: int
    mixed: int
    rows: tuple[BandRow, ...]


@dataclass(frozen=True)
class _Numbers:
    """The numbers of the first line."""

    low: float
    high: float
    probed: int
    mixed: int


def write_band(path: Path, band: Band) -> None:
    """Write the file beside and rename it, so that a reader never sees half of it."""
    head = {"format": BAND_FORMAT, "conditions": asdict(band.conditions), "low": band.low, "high": band.high}
    lines = [dump_line({**head, "probed": band.probed, "mixed": band.mixed, "in_band": len(band.rows)})]
    lines += [dump_line(asdict(row)) for row in band.rows]
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    beside.replace(path)


def read_band(path: Path) -> Band:
    """The band of a file. ValueError naming the file, the line and what is missing, cut off or not of this format."""
    key = f"task.band_file={path}"
    lines = stored_lines(path, key, "mcore-rl probe writes one")
    head, rows = (lines[0], lines[1:]) if lines else ({}, [])
    if head.get("format") != BAND_FORMAT:
        raise ValueError(f"{key}: not a band file of format {BAND_FORMAT} (its first line has the conditions)")
    if head.get("in_band") != len(rows):
        raise ValueError(f"{key}: {len(rows)} rows where its first line counts {head.get('in_band')}")
    conditions = read_record(Conditions, head.get("conditions"), f"{key}, line 1: key 'conditions'")
    numbers = {field.name: head[field.name] for field in fields(_Numbers) if field.name in head}
    said = read_record(_Numbers, numbers, f"{key}, line 1")
    found = tuple(read_record(BandRow, row, f"{key}, line {number}") for number, row in enumerate(rows, start=FIRST_ROW_LINE))
    band = Band(conditions, said.low, said.high, said.probed, said.mixed, found)
    _check_rows(band, key)
    return band


def stored_lines(path: Path, key: str, hint: str) -> list[dict[str, Any]]:
    """Rows of a file that a probe wrote. ValueError naming `key` when it is not there or not readable; `hint` helps."""
    try:
        if not path.is_file():
            raise ValueError(f"{key}: no such file; {hint}")
        return read_texts(path)
    except OSError as error:
        raise ValueError(f"{key}: cannot be read: {error.strerror or error}") from error


def _check_rows(band: Band, key: str) -> None:
    """ValueError naming the first row that is there twice, or whose pass rate is impossible or outside the band."""
    lines: dict[str, int] = {}
    for number, row in enumerate(band.rows, start=FIRST_ROW_LINE):
        where = f"{key}, line {number}"
        if not (row.samples > 0 and 0 <= row.correct <= row.samples):
            raise ValueError(f"{where}: {row.correct} correct of {row.samples} samples cannot be")
        if not band.low <= row.correct / row.samples <= band.high:
            raise ValueError(f"{where}: {row.correct} of {row.samples} correct is outside the band {band.low} to {band.high}")
        first = lines.setdefault(row.question, number)
        if first != number:
            raise ValueError(f"{where}: question {row.question!r} is in line {first} already")


def different_conditions(one: Conditions, other: Conditions, *, ignore: Sequence[str] = ()) -> str | None:
    """`name is a in the one and b in the other` for the first condition that differs; None when none does."""
    left, right = asdict(one), asdict(other)
    for name, value in left.items():
        if name not in ignore and value != right[name]:
            return f"{name} is {value!r} there and {right[name]!r} here"
    return None
