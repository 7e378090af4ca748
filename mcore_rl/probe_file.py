"""probe.jsonl read back: the pass rates of an earlier probe, which a later one takes over (data_gate.append_to)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mcore_rl.data.band_file import FIRST_ROW_LINE, Conditions, different_conditions, stored_lines
from mcore_rl.data.records import read_record
from mcore_rl.data_gate import PassRate
from mcore_rl.types import Prompt

PROBE_FORMAT = 1


def read_probe(path: str) -> tuple[Conditions, list[PassRate]]:
    """Conditions and rows of a probe file. A half-written last line is left out.

    ValueError naming the file and the line: no probe file, damaged, or its prompts are not the first ones.
    """
    key = f"data_gate.append_to={path}"
    lines = stored_lines(Path(path), key, "the probe.jsonl of an earlier probe is needed")
    if not lines or lines[0].get("format") != PROBE_FORMAT:
        raise ValueError(f"{key}: not a probe file of format {PROBE_FORMAT}")
    conditions = read_record(Conditions, lines[0].get("conditions"), f"{key}, line 1: key 'conditions'")
    rows: list[PassRate] = []
    for number, line in enumerate(lines[1:], start=FIRST_ROW_LINE):
        row = read_record(PassRate, line, f"{key}, line {number}")
        counts = (row.correct, row.extracted, row.truncated, row.reward_failures)
        if row.samples != conditions.samples or not all(0 <= count <= row.samples for count in counts):
            raise ValueError(f"{key}, line {number}: {row} cannot be of {conditions.samples} samples")
        rows.append(row)
    if [row.prompt_id for row in rows] != [f"probe-p{i}" for i in range(len(rows))]:
        raise ValueError(f"{key}: its prompts are not probe-p0, probe-p1, ... in order")
    return conditions, rows


def earlier_rows(path: str | None, conditions: Conditions) -> list[PassRate]:
    """Rows of data_gate.append_to, [] where it is not set. ValueError as `read_probe`, and for other conditions."""
    if path is None:
        return []
    made_under, rows = read_probe(path)
    difference = different_conditions(made_under, conditions)
    if difference is not None:
        raise ValueError(f"data_gate.append_to={path}: made under other conditions: {difference}")
    return rows


def check_same_prompts(path: str | None, rows: Sequence[PassRate], prompts: Sequence[Prompt]) -> None:
    """ValueError naming the first row that is not about the prompt at its place; `prompts` are those probed now."""
    for number, (row, prompt) in enumerate(zip(rows, prompts, strict=False), start=FIRST_ROW_LINE):
        there, here = (row.question, row.answer), (prompt.question, prompt.answer)
        if there != here:
            raise ValueError(
                f"data_gate.append_to={path}, line {number}: {row.prompt_id} is {there} there and {here} in this task; "
                "pass rates of other data cannot be taken over"
            )
