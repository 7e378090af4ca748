"""Weights & Biases. The only file that imports it; offline needs neither network nor login."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import wandb

WANDB_MODES = ("offline", "online", "disabled")


class WandbSink:
    """Scalars as they are; a list (expert load) as a histogram over its positions. Everything stays in the run folder."""

    def __init__(self, folder: Path, *, mode: str, project: str, name: str, config: dict[str, Any]) -> None:
        """mode: offline, online or disabled (ValueError otherwise). config: the resolved run configuration."""
        if mode not in WANDB_MODES:
            raise ValueError(f"telemetry.wandb={mode}: one of {', '.join(WANDB_MODES)}")
        folder.mkdir(parents=True, exist_ok=True)
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "wandb" / "cache"))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._run = wandb.init(
            dir=str(folder),
            mode=cast(Literal["offline", "online", "disabled"], mode),
            project=project,
            name=name,
            config=config,
            settings=wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True),
        )

    def log_step(self, step: int, metrics: dict[str, float | list[float]]) -> None:
        """One history row; NaN is kept."""
        row = {name: _histogram(value) if isinstance(value, list) else value for name, value in metrics.items()}
        self._run.log(row, step=step)

    def log_rollouts(self, step: int, records: Sequence[dict[str, object]]) -> None:
        """Rollouts are in rollouts.jsonl; here only their number, so that a lost batch shows."""
        self._run.log({"rollouts_logged": len(records)}, step=step)

    def close(self) -> None:
        """Finish the run and wait for its files."""
        self._run.finish()


def _histogram(load: list[float]) -> wandb.Histogram:
    return wandb.Histogram(np_histogram=(np.asarray(load, dtype=float), np.arange(len(load) + 1)))
