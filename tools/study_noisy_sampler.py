"""Which algorithms keep learning from a sampler that is wrong on purpose? Three seeds of a small quickstart on two cores.

    python tools/study_noisy_sampler.py [--seeds 0 1 2] [--noise 0.2] [--variants NAME ...] [--only-table] [key=value ...]

Everything is the real thing: Megatron ranks, vLLM, proved sync. The engine is given the policy's weights times
(1 + noise), the same noise at every sync; the trainer keeps the clean ones, with which the held-out prompts are answered.
Figures go to runs/study_noisy_sampler/, the tables to docs/study_noisy_sampler.md; its last section is written by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study_noisy_table import LEARNING, MISMATCH, MONITORS, SeedRun, intervals, read_seed, spread, table
from study_noisy_variants import FOLDER, NOISE_STD, ROOT, SEEDS, VARIANTS, Variant, chosen, study_config

from mcore_rl.config.compose import load_config, resolved_yaml
from mcore_rl.config.validate import validate
from mcore_rl.launch import rank_environment
from mcore_rl.ranks import run_ranks
from mcore_rl.run_folder import fresh_folder, write_json, write_launch

DOCUMENT = ROOT / "docs" / "study_noisy_sampler.md"
READING = "## Reading"
RANK = Path(__file__).with_name("study_noisy_rank.py")


def main() -> int:
    """Run the seeds, write the document; the exit code."""
    asked = arguments()
    if not asked.only_table:
        variants, started = chosen(asked.variants), time.monotonic()
        for seed in asked.seeds:
            run_seed(seed, variants, asked)
        FOLDER.mkdir(parents=True, exist_ok=True)
        facts = {
            "seeds": asked.seeds,
            "variants": [variant.name for variant in variants],
            "noise_std": asked.noise,
            "overrides": asked.overrides,
            "seconds": round(time.monotonic() - started, 1),
            "cores": len(os.sched_getaffinity(0)),
        }
        write_json(FOLDER / "study.json", facts)
    write_document(asked.out)
    return 0


def arguments() -> argparse.Namespace:
    """The command line. Settings of the runs are key=value, as everywhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--noise", type=float, default=NOISE_STD, help="relative standard deviation on every matrix")
    parser.add_argument("--variants", nargs="+", default=[variant.name for variant in VARIANTS])
    parser.add_argument("--only-table", action="store_true", help="write the document from the figures of the last study")
    parser.add_argument("--out", type=Path, default=DOCUMENT)
    known, overrides = parser.parse_known_args()
    known.overrides = overrides
    return known


def run_seed(seed: int, variants: Sequence[Variant], asked: argparse.Namespace) -> None:
    """All variants of a seed in one set of ranks. SystemExit with the reason when they fail."""
    configs = {variant.name: study_config(variant, seed, asked.overrides) for variant in variants}
    for config in configs.values():
        validate(config, "train", local_ranks=config.layout.world)
        if config.eval.prompts < 1 or not config.eval.temperature_1:
            raise ValueError("the study compares held-out answers: eval.prompts >= 1 and eval.temperature_1=true are needed")
    first = next(iter(configs.values()))
    folder, _ = fresh_folder(first)
    folder.config.write_text(resolved_yaml(first))
    for name, config in configs.items():
        (folder.root / f"{name}.yaml").write_text(resolved_yaml(config))
    write_launch(folder, sys.argv)
    print(f"seed {seed}: {len(variants)} variants; logs in {folder.logs}", flush=True)
    command = [sys.executable, str(RANK), str(folder.config), str(asked.noise), *configs]
    outcome = run_ranks(command, world=first.layout.world, folder=folder, env=rank_environment(first))
    if outcome.exit_code:
        raise SystemExit(f"seed {seed}: {outcome.message}")


def write_document(path: Path) -> None:
    """Tables from the last study's files; what stands under the heading of the reading stays."""
    facts = json.loads((FOLDER / "study.json").read_text())
    seeds = list(facts["seeds"])
    runs = [
        (variant.says, [read_seed(FOLDER / f"seed{seed}", variant.name, seed) for seed in seeds])
        for variant in chosen(facts["variants"])
    ]
    old = path.read_text() if path.exists() else ""
    reading = old[old.index(READING) :] if READING in old else f"{READING}\n\nNot written yet.\n"
    path.write_text(f"{document(facts, runs)}\n\n{reading}")
    print(f"tables: {path}")


def document(facts: dict[str, Any], runs: Sequence[tuple[str, Sequence[SeedRun]]]) -> str:
    """Everything above the reading."""
    return "\n\n".join(
        [
            "# A sampler that is wrong on purpose",
            conditions(facts, runs[0][1]),
            "## What was learned\n\nHeld-out answers are those of the clean weights; `sampled accuracy` is that of the rollouts, "
            "drawn by the noisy engine. A seed gained when the whole 95% interval of its gain lies above 0.",
            table(LEARNING, runs),
            "## What the mismatch is\n\ndelta = old - sampler, at the same version, over all batches.",
            table(MISMATCH, runs),
            "## What the monitors say\n\n`ratio KL` is the mean of r - 1 - log r over the tokens; skew is (P + N) / (|P| + |N|) "
            "of the two halves of the policy loss. Each batch is two updates; the first is made at the weights that sampled.",
            table(MONITORS, runs),
            "## Every run",
            intervals(runs),
        ]
    )


def conditions(facts: dict[str, Any], first: Sequence[SeedRun]) -> str:
    """How the figures came about, from the study's own records."""
    config = load_config(FOLDER / f"seed{first[0].seed}" / "config.yaml")
    train = config.train
    seeds = ", ".join(str(run.seed) for run in first)
    return (
        f"`{command(facts)}`: seeds {seeds}, {facts['seconds'] / 60:.1f} minutes on {facts['cores']} cores, warm-ups and all "
        f"variants together. A seed is one warm-up (the quickstart's model and `sft`), whose checkpoint is the start of all "
        f"its variants; a variant is {train.steps} batches of {train.prompts_per_step} prompts x {train.samples_per_prompt} "
        f"answers, {train.updates_per_batch} updates each, learning rate {config.optimizer.lr:g}, on {config.layout.world} "
        f"ranks and vLLM. Before every batch the proved sync gives the engine each matrix (embeddings and router too) times "
        f"1 + {facts['noise_std']:g} x a standard normal number per element, drawn from seed and name: the same noise at every "
        f"sync and for all variants of a seed. Held-out: {first[0].start.n} test prompts, of which the clean "
        f"weights answer {spread([run.start.accuracy for run in first], '.3f')} at the start, and "
        f"{spread([run.start_t1.accuracy for run in first], '.3f')} at temperature 1. Figures are the mean over the seeds and, "
        f"in brackets, every seed."
    )


def command(facts: dict[str, Any]) -> str:
    """The command line that does the same study again."""
    words = ["python tools/study_noisy_sampler.py"]
    if facts["seeds"] != list(SEEDS):
        words += ["--seeds", *(str(seed) for seed in facts["seeds"])]
    if facts["noise_std"] != NOISE_STD:
        words += ["--noise", str(facts["noise_std"])]
    if facts["variants"] != [variant.name for variant in VARIANTS]:
        words += ["--variants", *facts["variants"]]
    return " ".join([*words, *facts["overrides"]])


if __name__ == "__main__":
    raise SystemExit(main())
