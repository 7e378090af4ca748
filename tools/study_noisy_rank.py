"""One rank of the study: warm up once, then every variant from the same checkpoint, in the same processes and engine.

RANK=.. WORLD_SIZE=.. python tools/study_noisy_rank.py CONFIG NOISE_STD VARIANT...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from study_noisy_variants import Variant, chosen
from study_noisy_weights import Noise, NoisyPolicy

from mcore_rl.assemble import Parts, assembled
from mcore_rl.config.compose import load_config
from mcore_rl.guard import die_with_parent, end_on_sigterm, on_uncaught
from mcore_rl.held_out import HeldOut, look, to_json
from mcore_rl.jobs import make_run, rl_policy, supervised_policy
from mcore_rl.loop import train
from mcore_rl.policy import MegatronPolicy
from mcore_rl.progress import Progress
from mcore_rl.run import Run
from mcore_rl.run_folder import run_folder, write_json
from mcore_rl.sft import warm_up
from mcore_rl.stages import sync
from mcore_rl.telemetry.fanout import FanOut
from mcore_rl.telemetry.jsonl_sink import JsonlSink
from mcore_rl.types import StopRun
from models.weights import ModelWeights, export_checkpoint, load_hf_weights
from parallel.collectives import on_rank0


@dataclass
class Study:
    """The parts and the run that all variants of a seed share, and the checkpoint they start from."""

    parts: Parts
    run: Run
    start: Path

    def say(self, text: str) -> None:
        """A line for whoever watches, on rank 0."""
        if self.run.progress is not None:
            self.run.progress.line(text)


def main(argv: list[str]) -> int:
    """Everything of one seed, as the rank that RANK names."""
    path, std, *names = argv
    rank = int(os.environ["RANK"])
    die_with_parent()
    end_on_sigterm()
    config = load_config(Path(path))
    on_uncaught(rank, run_folder(config).rank_error(rank))
    with assembled(config) as parts:
        run_study(parts, chosen(names), float(std))
    return 0


def run_study(parts: Parts, variants: Sequence[Variant], std: float) -> None:
    """Warm-up, a look at where everybody starts, then the variants one after the other. Collective."""
    config = parts.config
    progress = Progress(config.train.steps, enabled=config.telemetry.progress) if parts.engine is not None else None
    run = make_run(parts, supervised_policy(parts) if config.sft.steps else rl_policy(parts), progress)
    if run.audit is not None:
        run.audit.close()
        run.audit = None
    with closing(run.sinks):
        study = Study(parts, run, parts.model_path)
        if config.sft.steps:
            study.start = warmed_up(study)
        run.policy = restart(study)
        sync(run)
        report(study, "start.json", look(run, "where all variants start"), stopped=None)
        for variant in variants:
            run_variant(study, variant, std)


def warmed_up(study: Study) -> Path:
    """The checkpoint after the quickstart's supervised warm-up. Collective."""
    trainer, folder = study.parts.trainer, study.run.folder
    study.say("supervised warm-up")
    warm_up(study.run)
    weights = ModelWeights(trainer.chunks, trainer.spec, trainer.groups)
    export_checkpoint(weights, trainer.spec, source=study.parts.model_path, target=folder.checkpoint)
    return Path(on_rank0(lambda: str(folder.checkpoint)))


def restart(study: Study) -> MegatronPolicy:
    """The starting weights in the same modules, with a fresh optimizer, at version 0. Collective."""
    trainer = study.parts.trainer
    load_hf_weights(trainer.chunks, trainer.spec, trainer.groups, study.start)
    return rl_policy(replace(study.parts, config=study.run.config))


def run_variant(study: Study, variant: Variant, std: float) -> None:
    """Train with a noisy sampler, then look at what was learned with the clean weights. Collective."""
    run, root = study.run, study.run.folder.root
    run.config, run.log_rows = load_config(root / f"{variant.name}.yaml"), []
    clean = restart(study)
    run.policy = NoisyPolicy(clean, Noise(run.config.seed, std if variant.noisy else 0.0))
    study.say(variant.says)
    stopped: str | None = None
    with closing(sinks(study, root / variant.name)) as run.sinks:
        run.clock.take_step()
        try:
            train(run)
        except StopRun as error:  # a way for a variant to end, and to be reported
            stopped = str(error)
            study.say(f"stopped: {error}")
    run.policy = clean
    sync(run)
    report(study, f"{variant.name}/result.json", look(run, variant.name), stopped=stopped)


def sinks(study: Study, folder: Path) -> FanOut:
    """Metrics to the variant's own folder and to the screen, on rank 0."""
    if study.run.progress is None:
        return FanOut(())
    return FanOut((JsonlSink(folder, max_rollouts=0), study.run.progress))


def report(study: Study, name: str, found: HeldOut | None, *, stopped: str | None) -> None:
    """The held-out look and how training ended, on rank 0."""
    if study.parts.engine is not None:
        write_json(study.run.folder.root / name, {"stopped": stopped, **to_json({"held_out": found})})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
