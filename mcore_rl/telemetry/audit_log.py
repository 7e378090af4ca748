"""audit.jsonl: one line per judged completion, enough to judge it again without sampling it again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mcore_rl.telemetry.jsonl import dump_line


class AuditLog:
    """Appends records to one file, flushed at once. What a sampling of the records left out is written by `close`."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._left_out: dict[str, int] = {}

    def write(self, records: Sequence[Mapping[str, object]], *, left_out: Mapping[str, int] | None = None) -> None:
        """Append one line per record. left_out: how many records of each kind were not given."""
        self._file.writelines(dump_line(record) + "\n" for record in records)
        self._file.flush()
        for kind, count in (left_out or {}).items():
            self._left_out[kind] = self._left_out.get(kind, 0) + count

    def close(self) -> None:
        """Say what was left out, and close. Twice is fine."""
        if self._file.closed:
            return
        if any(self._left_out.values()):
            self._file.write(dump_line({"records_left_out": self._left_out}) + "\n")
        self._file.close()
