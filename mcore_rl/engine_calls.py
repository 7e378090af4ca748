"""What a run asks of its engines, surviving their deaths: collective over the trainer's ranks.

An engine that died is replaced on rank 0, every engine gets a proved sync with a full read-back, and then the question
is asked again, with the same seeds. Beyond rollout.max_engine_restarts deaths the run ends with the last one's message.
An engine that lives and failed its proof ends the run, or is synced again in full: sync.on_failed_proof.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from mcore_rl.run import Run
from mcore_rl.seams import RolloutEngine
from mcore_rl.sync.resync import proved_or_resynced
from mcore_rl.types import EngineDied, Pass, SyncReport
from parallel.collectives import on_rank0

T = TypeVar("T")


def ask_engine(run: Run, ask: Callable[[RolloutEngine], T]) -> T:
    """Rank 0's `ask(engine)` (builtins) on every rank. `ask` may be called again, so it must leave nothing behind."""
    if run.own_sampler is not None:
        return run.own_sampler.ask(ask)
    while True:
        try:
            return on_rank0(lambda: ask(run.sampler()))
        except EngineDied:
            if not _survives(run):
                raise
            proved_sync(run)


def proved_sync(run: Run) -> SyncReport:
    """Every engine at the policy's weights, proved; engines that were lost or moved are replaced first."""
    if run.own_sampler is not None:
        return run.own_sampler.sync()
    source = run.policy.weights()
    while True:
        _refresh(run)
        try:
            if run.config.rollout.sleep_level:
                on_rank0(lambda: None if run.fleet is None else run.fleet.wake())
            return proved_or_resynced(
                run.weight_sync, source, lambda: probe_logprobs(run), run.config.sync, tell=lambda line: _say(run, line)
            )
        except EngineDied:
            if not _survives(run):
                raise


def rest(run: Run) -> None:
    """The engines are not needed until the next sync: with rollout.sleep_level they give their GPU memory back."""
    if not run.config.rollout.sleep_level:
        return
    try:
        on_rank0(lambda: None if run.fleet is None else run.fleet.rest())
    except EngineDied:  # the next sync replaces it
        if not _survives(run):
            raise


def probe_logprobs(run: Run) -> list[list[float]]:
    """The trainer's log-probs (nats) of the probe sequences, every token after the first."""
    values = run.policy.logprobs(run.probe, Pass.PROBE)
    return [row[1:].tolist() for row in values.logprobs]


def engine_metrics(run: Run) -> dict[str, float | list[float]]:
    """engine/restarts: deaths that the run has survived so far; engine/alive: engines that answer; sync/resyncs: complete
    syncs that followed a failed proof so far. On rank 0.
    """
    if run.fleet is None:
        return {}
    return {
        "engine/restarts": float(run.fleet.losses),
        "engine/alive": float(len(run.fleet.members)),
        "sync/resyncs": float(run.weight_sync.resyncs),
    }


def _survives(run: Run) -> bool:
    return on_rank0(lambda: run.fleet is not None and run.fleet.survives())


def _refresh(run: Run) -> None:
    """Replace what is lost; after any change the next sync sets up and reads back everything. Says it in one line each.

    A list of addresses that cannot be used changes no engine: it is only said.
    """
    changes = on_rank0(lambda: [] if run.fleet is None else run.fleet.refresh())
    if changes:
        run.weight_sync.renew()
    for line in changes + on_rank0(lambda: [] if run.fleet is None else run.fleet.complaints()):
        _say(run, line)


def _say(run: Run, line: str) -> None:
    if run.progress is not None:
        run.progress.line(line)
