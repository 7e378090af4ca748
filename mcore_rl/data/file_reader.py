"""GSM8K-style files: one object per line (JSONL) or row (parquet) with `question` and `answer` ending in `#### n`."""

from __future__ import annotations

import codecs
import json
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.lib
import pyarrow.parquet

from mcore_rl.data.problem import Problem
from mcore_rl.rewards.values import parse_gsm8k_answer

ANNOTATION = re.compile(r"<<[^>]*>>")
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
COLUMNS = ("question", "answer")


@dataclass(frozen=True)
class FileRows:
    """Problems of a file in order, and one line per row that was left out: file, line (or row), key, why."""

    problems: list[Problem]
    bad_rows: tuple[str, ...] = ()


def read_file(path: str | Path, *, skip_bad: bool) -> FileRows:
    """The problems of a file. skip_bad: unusable rows are left out and named in `bad_rows` instead of raising.

    ValueError: no such file, unknown suffix, not a parquet file, no usable row.
    """
    file = Path(path)
    try:
        rows = _rows(file)
    except OSError as error:
        raise ValueError(f"task file {file}: cannot be read: {error.strerror or error}") from error
    problems: list[Problem] = []
    bad: list[str] = []
    for where, row in rows:
        try:
            problems.append(_problem(where, row))
        except ValueError as error:
            if not skip_bad:
                raise
            bad.append(str(error))
    if not problems:
        raise ValueError(f"task file {file}: empty, no prompts left" + (f"; first bad row: {bad[0]}" if bad else ""))
    return FileRows(problems, tuple(bad))


def _rows(file: Path) -> list[tuple[str, Any]]:
    """All rows by the file's suffix. ValueError as `read_file`; OSError from the disk."""
    if not file.is_file():
        found = "is not a file" if file.exists() else "no such file"
        raise ValueError(f"task file {file}: {found}; a .jsonl, .json or .parquet file is needed")
    readers = {".jsonl": _jsonl_rows, ".json": _jsonl_rows, ".parquet": _parquet_rows}
    if file.suffix not in readers:
        raise ValueError(f"task file {file}: suffix '{file.suffix}' is unknown; one of {sorted(readers)}")
    return list(readers[file.suffix](file))


def _jsonl_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, object or the error that stands in its place); blank lines and a byte order mark are skipped."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            content = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if content.strip():
                where = f"{file}:{number}"
                yield where, _json_row(content, where)


def _json_row(line: bytes, where: str) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start}")
    except (ValueError, RecursionError) as error:
        return ValueError(f"{where}: not a JSON object: {error}")


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """(file:row, object or the error that stands in its place), rows counted from 1."""
    try:
        table = pyarrow.parquet.read_table(file)
    except pyarrow.lib.ArrowInvalid as error:
        raise ValueError(f"task file {file}: not a parquet file: {str(error).partition(chr(10))[0]}") from error
    number = 0
    for batch in table.to_batches():
        columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names) if name in COLUMNS}
        for i in range(batch.num_rows):
            number += 1
            where = f"{file}:{number}"
            yield where, _parquet_row(columns, i, where)


def _parquet_row(columns: Mapping[str, Any], i: int, where: str) -> Any:
    try:
        return {name: column[i].as_py() for name, column in columns.items()}
    except UnicodeDecodeError as error:
        return ValueError(f"{where}: not UTF-8: {error.reason} at byte {error.start}")


def _problem(where: str, row: object) -> Problem:
    """One row as a problem. ValueError naming the key that is missing or wrong, or what stood in the row's place."""
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {type(row).__name__} where an object with 'question' and 'answer' is needed")
    for key in COLUMNS:
        value = row.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{where}: key '{key}' is {'missing' if key not in row else _short(value)}; a text is needed")
        if LONE_SURROGATE.search(value):
            raise ValueError(f"{where}: key '{key}' has half of a surrogate pair in {_short(value)}; no UTF-8 text holds one")
    try:
        answer = parse_gsm8k_answer(row["answer"])
    except ValueError as error:
        raise ValueError(f"{where}: key 'answer' {error}") from error
    worked = ANNOTATION.sub("", row["answer"].rpartition("####")[0]).strip()
    return Problem(row["question"].strip(), answer, worked, answer)


def _short(value: object) -> str:
    return reprlib.repr(value)
