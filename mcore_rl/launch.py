"""`mcore-rl train|sft|distill|eval|probe` without torchrun: check everything, make the run folder, start the local ranks."""

from __future__ import annotations

import sys

from mcore_rl.config.compose import resolved_yaml
from mcore_rl.config.device import uses_cuda
from mcore_rl.config.schema import RunConfig
from mcore_rl.config.validate import validate
from mcore_rl.progress import say
from mcore_rl.ranks import run_ranks
from mcore_rl.run_folder import fresh_folder, write_launch
from mcore_rl.summary import summarise_failure


def launch(stage: str, config: RunConfig, command: list[str]) -> int:
    """Run `stage` on this host's ranks; the exit code. The last line on stderr says why a run failed.

    Raises ValueError before anything starts when the configuration cannot work. A run goes on when nobody reads its stdout.
    """
    validate(config, stage, local_ranks=config.layout.world)
    folder, moved = fresh_folder(config)
    if moved is not None:
        say(f"an earlier run of this name is kept in {moved}", sys.stdout)
    folder.config.write_text(resolved_yaml(config), encoding="utf-8")
    write_launch(folder, command)
    say(f"{stage}: starting {config.layout.world} rank(s); logs in {folder.logs}", sys.stdout)
    ranks = [sys.executable, "-m", "mcore_rl.rank", stage, str(folder.config)]
    outcome = run_ranks(ranks, world=config.layout.world, folder=folder, env=rank_environment(config))
    if outcome.exit_code:
        summarise_failure(folder, outcome.message)
        say(f"mcore-rl {stage}: {outcome.message}", sys.stderr)
    return outcome.exit_code


def rank_environment(config: RunConfig) -> dict[str, str]:
    """What every rank's environment needs: one thread each, and on CPU no compiler (inductor would need a C++ one) and
    large pages, without which touching new memory takes four times as long."""
    env = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if not uses_cuda(config.device):
        env |= {"TORCHDYNAMO_DISABLE": "1", "THP_MEM_ALLOC_ENABLE": "1"}
    return env
