"""A folder that appears under its name only when it is complete, built unit by unit so that an interrupted build goes on.

Everything is written into `.NAME.incomplete` beside the target. A journal there says which units are done and what they
are made from; the last step renames the folder. A build killed at any point leaves nothing under the target's name.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

JOURNAL = "journal.jsonl"
_MAX_NAME_BYTES = 255
SPARE_BYTES = 16 * 1024**2


@dataclass(frozen=True)
class Step:
    """Progress: a unit is done. done_bytes counts units of an interrupted build that were taken over as well."""

    unit: str
    done_bytes: int
    total_bytes: int
    resumed: bool


Report = Callable[[Step], None]


def silent(_: Step) -> None:
    """Progress for nobody."""


def check_free_space(folder: Path, needed_bytes: int) -> None:
    """ValueError with the figures when the file system of `folder` has less room."""
    there = next(parent for parent in (folder, *folder.resolve().parents) if parent.is_dir())
    free = shutil.disk_usage(there).free
    if free < needed_bytes + SPARE_BYTES:
        raise ValueError(f"{folder}: {needed_bytes / 1e9:.2f} GB are needed, but {there} has {free / 1e9:.2f} GB free")


def file_in_the_way(folder: Path) -> Path | None:
    """What stands where `folder` or a folder above it would be and is none."""
    path = folder.absolute()
    return next((place for place in (path, *path.parents) if place.exists() and not place.is_dir()), None)


def _hidden(target: Path) -> Path:
    return target.with_name(f".{target.name}.incomplete")


def check_target(target: Path, *sources: Path) -> None:
    """ValueError when no folder can appear under that name, or when it would lie inside one of the sources."""
    if target.name in ("", ".."):
        raise ValueError(f"{target} names no new folder")
    long = [part for part in (_hidden(target).name, *target.parts) if len(os.fsencode(part)) > _MAX_NAME_BYTES]
    if long:
        raise ValueError(f"{target}: its name is too long; at most {_MAX_NAME_BYTES} bytes, with .incomplete, are possible")
    if target.is_symlink() and not target.exists():
        raise ValueError(f"{target} is a link to {target.readlink()}, which does not exist")
    if target.exists():
        raise ValueError(f"{target} already exists; a checkpoint is never written over another one")
    file = file_in_the_way(target.parent)
    if file is not None:
        raise ValueError(f"{target}: {file} is a file, so there can be no folder below it")
    inside = [source for source in sources if target.resolve().is_relative_to(source.resolve())]
    if inside:
        raise ValueError(f"{target} lies inside {inside[0]}, which it is made from")


class Staging:
    """The hidden folder and its journal. Use it as a context manager; call `complete` last.

    fingerprint: everything the result depends on; a journal of another one is thrown away with its folder.
    fsync: every unit is on the disk before the journal says so, and the whole before the rename.
    """

    def __init__(self, target: Path, fingerprint: str, *, fsync: bool = True) -> None:
        """Take over what an interrupted build left. ValueError when the target exists or somebody else is building it."""
        check_target(target)
        self.target, self.fsync = target, fsync
        self.folder = _hidden(target)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{self.folder} cannot be made: {error.strerror}") from error
        self._journal = (self.folder / JOURNAL).open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._journal.close()
            raise ValueError(f"{self.folder} is being written by another process") from error
        self.done: dict[str, Any] = self._take_over(fingerprint)

    def _take_over(self, fingerprint: str) -> dict[str, Any]:
        self._journal.seek(0)
        rows = _whole_rows(self._journal.read())
        if rows and rows[0] == {"fingerprint": fingerprint}:
            return {row["unit"]: row["record"] for row in rows[1:]}
        for path in self.folder.iterdir():
            if path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._journal.truncate(0)
        self._append({"fingerprint": fingerprint})
        return {}

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self._journal.close()

    def _append(self, row: dict[str, Any]) -> None:
        self._journal.write("\n" + json.dumps(row))
        self._journal.flush()
        if self.fsync:
            os.fsync(self._journal.fileno())

    def finish(self, unit: str, record: Any) -> None:
        """The unit's files are closed (and on the disk, with fsync)."""
        self.done[unit] = record
        self._append({"unit": unit, "record": record})

    def finish_file(self, name: str) -> None:
        """A unit that is one file of that name."""
        self.finish(name, (self.folder / name).stat().st_size)

    def has_file(self, name: str) -> bool:
        """True when an interrupted build finished that file and it is still whole."""
        path = self.folder / name
        return name in self.done and path.is_file() and path.stat().st_size == self.done[name]

    def complete(self) -> None:
        """The folder gets its name."""
        if self.fsync:
            for path in (*self.folder.rglob("*"), self.folder):
                sync_path(path)
        self.folder.rename(self.target)
        (self.target / JOURNAL).unlink()
        if self.fsync:
            sync_path(self.target.parent)


def _whole_rows(text: str) -> list[dict[str, Any]]:
    """The journal's rows, without one that a kill has cut short."""
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        with suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def sync_path(path: Path) -> None:
    """Wait until the file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
