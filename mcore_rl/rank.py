"""One rank of a run: read the resolved configuration, run the stage.

`python -m mcore_rl.rank STAGE CONFIG_YAML` is what our launcher starts; under torchrun the command line calls
`run_under_torchrun`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from mcore_rl.config.compose import load_config, resolved_yaml
from mcore_rl.config.schema import RunConfig
from mcore_rl.config.validate import validate
from mcore_rl.distill_job import run_distill
from mcore_rl.guard import die_with_parent, end_on_sigterm, on_uncaught
from mcore_rl.jobs import run_eval, run_probe, run_sft, run_train
from mcore_rl.run_folder import fresh_folder, run_folder, write_launch

STAGES: dict[str, Callable[[RunConfig], None]] = {
    "train": run_train,
    "sft": run_sft,
    "distill": run_distill,
    "eval": run_eval,
    "probe": run_probe,
}


def main(argv: list[str]) -> int:
    """Run stage argv[0] on the configuration file argv[1] as the rank that RANK names."""
    stage, path = argv
    rank = int(os.environ["RANK"])
    die_with_parent()
    end_on_sigterm()
    config = load_config(Path(path))
    on_uncaught(rank, run_folder(config).rank_error(rank))
    STAGES[stage](config)
    return 0


def run_under_torchrun(stage: str, config: RunConfig, command: list[str]) -> int:
    """Run `stage` as one of torchrun's ranks; the exit code. Every rank checks the configuration, rank 0 speaks."""
    rank = int(os.environ["RANK"])
    end_on_sigterm()
    try:
        _check_world(config)
        validate(config, stage)
    except ValueError as error:
        if rank == 0:
            _tell_stderr(str(error))
        return 2
    if rank == 0:
        folder, _ = fresh_folder(config)
        folder.config.write_text(resolved_yaml(config), encoding="utf-8")
        write_launch(folder, command)
    on_uncaught(rank, run_folder(config).rank_error(rank), tell=_tell_stderr)
    STAGES[stage](config)
    return 0


def _check_world(config: RunConfig) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if world != config.layout.world:
        raise ValueError(f"layout.world={config.layout.world}, but torchrun started {world} ranks; both must be the same")


def _tell_stderr(line: str) -> None:
    sys.stderr.write(f"mcore-rl: {line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
