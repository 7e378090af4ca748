"""Real `mcore-rl train` runs for tests: started as a user would, watched through their files, and checked for orphans."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SMALL = (
    "experiment=quickstart",
    "sft.steps=0",
    "train.prompts_per_step=4",
    "train.samples_per_prompt=2",
    "eval.prompts=8",
    "telemetry.wandb=disabled",
    "sync.readback_every=1",
    "optimizer.lr=1e-2",
    "optimizer.weight_decay=0.1",  # an untrained model earns nothing: this is what moves its weights
)
FINISHED_LOADING = re.compile(r"RotaryEmbedding: Failed to load weights")
CACHE_RESET = re.compile(r"Successfully reset prefix cache")


@dataclass
class CliRun:
    """One run under way. folder: runs/<name>; started: epoch seconds."""

    process: subprocess.Popen[str]
    folder: Path

    def rows(self) -> list[dict[str, Any]]:
        """Metric rows written so far."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        """The run's summary.json."""
        return json.loads((self.folder / "summary.json").read_text())

    def finish(self, limit_s: float) -> tuple[int, str, str]:
        """Exit code, stdout, stderr; fails the test when the run is still alive after limit_s."""
        out, err = self.process.communicate(timeout=limit_s)
        return self.process.returncode, out, err

    def leftovers(self) -> list[str]:
        """Command lines of processes that still belong to this run (they name its folder or were its children)."""
        mark = str(self.folder)
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "environ"]):
            command = " ".join(process.info["cmdline"] or [])
            if mark in command and process.info["pid"] != os.getpid():
                found.append(command)
        return found


def start_run(out_dir: Path, name: str, *overrides: str, stage: str = "train", base: Sequence[str] = SMALL) -> CliRun:
    """`python -m mcore_rl STAGE` with `base` (the small quickstart) and `overrides`."""
    command = [sys.executable, "-m", "mcore_rl", stage, *base, f"out_dir={out_dir}", f"name={name}", *overrides]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    return CliRun(process, out_dir / name)


def wait_for(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Poll until `condition`; fails naming what was waited for."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {limit_s:.0f} s in vain for {what}")
        time.sleep(0.01)


def wait_for_rows(run: CliRun, count: int, limit_s: float = 240.0) -> None:
    """Until `count` training steps are on record, or the run is over."""
    wait_for(lambda: len(run.rows()) >= count or run.process.poll() is not None, limit_s, f"{count} training steps")
    if len(run.rows()) < count:
        _, err = run.process.communicate()
        raise AssertionError(f"the run ended with {len(run.rows())} steps: {err[-1000:]}")


def wait_for_line(log: Path, pattern: re.Pattern[str], limit_s: float = 120.0) -> None:
    """Until a line that matches is added to `log`."""
    seen = len(pattern.findall(log.read_text(errors="replace")))
    wait_for(lambda: len(pattern.findall(log.read_text(errors="replace"))) > seen, limit_s, f"{pattern.pattern!r} in {log}")


def descendants(pid: int) -> list[psutil.Process]:
    """Every process below `pid`, oldest first."""
    return psutil.Process(pid).children(recursive=True)


def engine_process(run: CliRun) -> psutil.Process:
    """The owned engine of a run."""
    found = [p for p in descendants(run.process.pid) if "mcore_rl.rollout.vllm_child" in " ".join(p.cmdline())]
    assert len(found) == 1, [p.cmdline() for p in found]
    return found[0]


def kill(process: psutil.Process) -> None:
    """SIGKILL."""
    process.send_signal(signal.SIGKILL)
