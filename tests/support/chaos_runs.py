"""Real runs whose engines are killed or stopped while they work, and what an undisturbed run of the same seeds drew."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from cli_runs import CliRun, descendants, start_run, wait_for

CHILD = "mcore_rl.rollout.vllm_child"
# Weights held: nothing but the engine's own life can change what is drawn. One rank, and nothing but training.
HELD = (
    "layout=single",
    "optimizer.lr=0",
    "optimizer.weight_decay=0",
    "eval.prompts=2",
    "eval.temperature_1=false",
    "eval.export_check_prompts=0",
)


@dataclass(frozen=True)
class Strike:
    """One signal: what was sent when (steps on record, seconds later), and how long until the next step was on record."""

    number: int
    signal: str
    steps: int
    delay_s: float
    recovered_s: float


@dataclass
class Comparison:
    """Completions of a disturbed run against those of an undisturbed one, by (prompt, sample)."""

    total: int = 0
    equal: int = 0
    missing: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)


def start_held(folder: Path, name: str, *overrides: str) -> CliRun:
    """A run at learning rate 0."""
    return start_run(folder, name, *HELD, *overrides)


def engine_children(run: CliRun) -> list[psutil.Process]:
    """Owned engines that live, oldest first."""
    found: list[psutil.Process] = []
    for process in descendants(run.process.pid):
        with suppress(psutil.NoSuchProcess):
            if CHILD in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def strike(run: CliRun, signum: signal.Signals, *, limit_s: float = 120.0) -> int:
    """Send `signum` to the newest engine, waiting for there to be one; its pid."""
    wait_for(lambda: bool(engine_children(run)) or run.process.poll() is not None, limit_s, "an engine to strike")
    pid = engine_children(run)[-1].pid
    os.kill(pid, signum)
    return pid


def strike_after(
    run: CliRun, number: int, signum: signal.Signals, *, steps: int, delay_s: float, limit_s: float = 300.0
) -> Strike:
    """Strike `delay_s` after `steps` steps are on record (or now, if there are more) and wait until one more is."""
    wait_for(lambda: len(run.rows()) >= steps or run.process.poll() is not None, limit_s, f"{steps} steps")
    time.sleep(delay_s)
    before, started = len(run.rows()), time.monotonic()
    strike(run, signum)
    wait_for(lambda: len(run.rows()) > before or run.process.poll() is not None, limit_s, "the run to go on")
    return Strike(number, signum.name, before, delay_s, time.monotonic() - started)


def records(run: CliRun) -> list[dict[str, Any]]:
    """Every completion that the run logged."""
    return [json.loads(line) for line in (run.folder / "rollouts.jsonl").read_text().splitlines()]


def compare(disturbed: CliRun, reference: CliRun) -> Comparison:
    """Every (prompt, sample) of the reference once, and which have other tokens, with the log-probs where they part."""
    theirs = {record["sample_id"]: record for record in records(reference)}
    mine = {record["sample_id"]: record for record in records(disturbed)}
    counts = Counter(record["sample_id"] for record in records(disturbed))
    found = Comparison(total=len(theirs))
    found.missing = sorted(set(theirs) ^ set(mine))
    found.doubled = sorted(name for name, count in counts.items() if count > 1)
    for name in sorted(set(theirs) & set(mine)):
        if mine[name]["token_ids"] == theirs[name]["token_ids"]:
            found.equal += 1
        else:
            found.different.append(f"{name}: {_parting(mine[name], theirs[name])}")
    return found


def _parting(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    pairs = list(zip(mine["token_ids"], theirs["token_ids"], strict=False))
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), len(pairs))
    if at == len(pairs):
        return f"one ends after {at} tokens"
    gap = abs(mine["sampler_logprobs"][at] - theirs["sampler_logprobs"][at])
    return f"token {at}: {pairs[at][0]} or {pairs[at][1]}, log-probs {gap:.2e} nats apart"


def table(strikes: list[Strike]) -> str:
    """The strikes as lines of text."""
    head = f"{'':>3} {'signal':<8} {'after step':>10} {'delay s':>8} {'next step s':>12}"
    rows = [f"{s.number:>3} {s.signal:<8} {s.steps:>10} {s.delay_s:>8.2f} {s.recovered_s:>12.1f}" for s in strikes]
    return "\n".join([head, *rows])
