"""What a report is made from: the files of a run folder, and a record of every series that was looked for and not found."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

from mcore_rl.run_folder import RunFolder
from mcore_rl.telemetry.jsonl import decode, read_rows


@dataclass
class RunData:
    """rows of metrics.jsonl in step order; summary and manifest, {} where the run has none; missing: names not found."""

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    manifest: dict[str, Any]
    missing: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Step of each row."""
        return [int(row["step"]) for row in self.rows]

    def series(self, name: str) -> list[float] | None:
        """One value per row, NaN where a row lacks it; None (and noted as missing) when no row has it."""
        if not any(name in row for row in self.rows):
            self._note(name)
            return None
        return [float(row.get(name, math.nan)) for row in self.rows]

    def family(self, prefix: str) -> dict[str, list[float]]:
        """`prefix/<key>` series by key, in order of first appearance; noted as missing when there is none."""
        names = [name for name in self._names() if name.startswith(prefix + "/")]
        if not names:
            self._note(f"{prefix}/*")
        return {name.removeprefix(prefix + "/"): [float(row.get(name, math.nan)) for row in self.rows] for name in names}

    def layers(self, prefix: str) -> dict[int, list[Any]]:
        """`prefix/layer_<k>` values by layer number, ascending; noted as missing when there is none."""
        pattern = re.compile(re.escape(prefix) + r"/layer_(\d+)")
        found = {int(match.group(1)): name for name in self._names() if (match := pattern.fullmatch(name))}
        if not found:
            self._note(f"{prefix}/layer_*")
        return {layer: [row.get(found[layer]) for row in self.rows] for layer in sorted(found)}

    def number(self, name: str) -> float | None:
        """A number of the summary; None (and noted as missing) when it is not there or not a number."""
        value = self.summary.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._note(f"summary.{name}")
            return None
        return float(value)

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def _note(self, name: str) -> None:
        if name not in self.missing:
            self.missing.append(name)


def load_run(folder: RunFolder) -> RunData:
    """The files of a run; any of them may be missing, but not all. ValueError naming the folder or the broken file."""
    if not folder.root.is_dir():
        raise ValueError(f"no run folder at {folder.root}")
    present = [path for path in (folder.metrics, folder.summary, folder.manifest) if path.exists()]
    if not present:
        raise ValueError(f"{folder.root} holds no metrics.jsonl, summary.json or manifest.json, so it is not a run folder")
    rows = read_rows(folder.metrics) if folder.metrics.exists() else []
    data = RunData([row for row in rows if "step" in row], _object(folder, "summary"), _object(folder, "manifest"))
    data.missing += [path.name for path in (folder.metrics, folder.summary, folder.manifest) if path not in present]
    return data


def _object(folder: RunFolder, which: str) -> dict[str, Any]:
    path = folder.summary if which == "summary" else folder.manifest
    if not path.exists():
        return {}
    try:
        return decode(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON ({error.msg}, line {error.lineno})") from error
