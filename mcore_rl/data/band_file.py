"""band.jsonl: the training prompts that are sometimes right, written by the pass-rate probe, read by training.

First line: the conditions (`Band`). Then one line per prompt: question, answer, how many of its samples were correct.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcore_rl.telemetry.jsonl import dump_line, read_rows

BAND_FORMAT = 1


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


def write_band(path: Path, band: Band) -> None:
    """Write the file beside and rename it, so that a reader never sees half of it."""
    head = {"format": BAND_FORMAT, "conditions": asdict(band.conditions), "low": band.low, "high": band.high}
    lines = [dump_line({**head, "probed": band.probed, "mixed": band.mixed, "in_band": len(band.rows)})]
    lines += [dump_line(asdict(row)) for row in band.rows]
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    beside.replace(path)


def read_band(path: Path) -> Band:
    """The band of a file. ValueError naming the file and what is missing, cut off or not of this format."""
    if not path.is_file():
        raise ValueError(f"task.band_file={path}: no such file; mcore-rl probe writes one")
    lines = read_rows(path)
    head, rows = (lines[0], lines[1:]) if lines else ({}, [])
    if head.get("format") != BAND_FORMAT:
        raise ValueError(f"task.band_file={path}: not a band file of format {BAND_FORMAT} (its first line has the conditions)")
    if head.get("in_band") != len(rows):
        raise ValueError(f"task.band_file={path}: {len(rows)} rows where its first line counts {head.get('in_band')}")
    try:
        found = tuple(BandRow(**row) for row in rows)
        return Band(read_conditions(head["conditions"]), head["low"], head["high"], head["probed"], head["mixed"], found)
    except (TypeError, KeyError) as error:
        raise ValueError(f"task.band_file={path}: {error}") from error


def read_conditions(record: Mapping[str, Any]) -> Conditions:
    """Conditions as they were written. TypeError for a field too many or too few."""
    return Conditions(**record)


def different_conditions(one: Conditions, other: Conditions, *, ignore: Sequence[str] = ()) -> str | None:
    """`name is a in the one and b in the other` for the first condition that differs; None when none does."""
    left, right = asdict(one), asdict(other)
    for name, value in left.items():
        if name not in ignore and value != right[name]:
            return f"{name} is {value!r} there and {right[name]!r} here"
    return None
