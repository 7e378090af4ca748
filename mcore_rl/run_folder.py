"""Names of everything inside runs/<name>/, and how a new run gets an empty one."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mcore_rl.config.schema import RunConfig
from models.convert_staging import file_in_the_way


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run. Nothing is created by looking."""

    root: Path

    @property
    def config(self) -> Path:
        """Resolved configuration."""
        return self.root / "config.yaml"

    @property
    def launch(self) -> Path:
        """Command line, folder and time of the start."""
        return self.root / "launch.json"

    @property
    def logs(self) -> Path:
        """One log per rank and engine."""
        return self.root / "logs"

    @property
    def metrics(self) -> Path:
        """One row per step."""
        return self.root / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        """One row per completion."""
        return self.root / "rollouts.jsonl"

    @property
    def audit(self) -> Path:
        """One row per judged completion: what it earned and why."""
        return self.root / "audit.jsonl"

    @property
    def summary(self) -> Path:
        """The run in a dozen numbers."""
        return self.root / "summary.json"

    @property
    def manifest(self) -> Path:
        """The conditions the numbers were made under."""
        return self.root / "manifest.json"

    @property
    def report(self) -> Path:
        """Self-contained page."""
        return self.root / "report.html"

    @property
    def plots(self) -> Path:
        """The report's pictures."""
        return self.root / "plots"

    @property
    def checkpoint(self) -> Path:
        """Hugging Face checkpoint written at the end."""
        return self.root / "checkpoint"

    def rank_log(self, rank: int) -> Path:
        """Everything rank `rank` and its libraries printed."""
        return self.logs / f"rank{rank}.log"

    def rank_error(self, rank: int) -> Path:
        """Why rank `rank` stopped, if it stopped with an error."""
        return self.logs / f"rank{rank}.error.json"


def run_folder(config: RunConfig) -> RunFolder:
    """The folder of this run: out_dir/name."""
    return RunFolder(Path(config.out_dir) / config.name)


def fresh_folder(config: RunConfig) -> tuple[RunFolder, Path | None]:
    """An empty folder for a new run; an earlier run of that name is kept beside it as <name>.1, <name>.2, ...

    Returns the folder and where the earlier run went (None if there was none). ValueError where a file stands in the way or
    nothing can be written.
    """
    folder = run_folder(config)
    file = file_in_the_way(folder.root)
    if file is not None:
        raise ValueError(f"out_dir={config.out_dir}: {file} is a file; a folder is needed for {folder.root}")
    moved: Path | None = None
    try:
        if folder.root.exists() and any(folder.root.iterdir()):
            moved = folder.root.with_name(f"{config.name}.{_next_number(folder.root)}")
            folder.root.rename(moved)
        folder.logs.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise ValueError(f"out_dir={config.out_dir}: {failure.filename} cannot be written: {failure.strerror}") from failure
    return folder, moved


def write_launch(folder: RunFolder, command: Sequence[str]) -> None:
    """Record how this run was started."""
    started = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(folder.launch, {"command": shlex.join(command), "cwd": str(Path.cwd()), "started": started})


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Strict JSON, written beside and renamed, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False) + "\n", encoding="utf-8")
    beside.replace(path)


def _next_number(root: Path) -> int:
    pattern = re.compile(re.escape(root.name) + r"\.(\d+)")
    taken = [int(match.group(1)) for entry in root.parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    return max(taken, default=0) + 1
