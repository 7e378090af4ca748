"""The stages of one step, each a plain function of the run. All are collective over the trainer's ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mcore_rl.auditing import audit_step
from mcore_rl.batching import RolloutBatch, build_rollout_batch, split_updates, train_batch
from mcore_rl.config.schema import ReplaySource, RouterMode
from mcore_rl.data_gate import early_kill_reason
from mcore_rl.engine_calls import ask_engine, engine_metrics, proved_sync, rest
from mcore_rl.rewards.checks import score_completions
from mcore_rl.routes import EncodedRoutes
from mcore_rl.run import Run
from mcore_rl.selecting import enough, select_groups, with_length_penalty
from mcore_rl.step_metrics import StepOutcome, rollout_records, step_metrics
from mcore_rl.types import (
    Completion,
    Pass,
    Prompt,
    SamplingParams,
    Score,
    StopRun,
    SyncReport,
    TrainBatch,
    UpdateReport,
    WeightMismatch,
)
from mcore_rl.update_terms import needs_old, with_chosen_tokens, with_correction, with_kl_reward
from parallel.collectives import on_rank0


@dataclass(frozen=True)
class PlannedUpdates:
    """The rollout batch of `step`, cut into optimizer updates."""

    rollout: RolloutBatch
    updates: tuple[TrainBatch, ...]
    step: int


def sync(run: Run) -> SyncReport:
    """Bring the engine to the policy's weights and prove it. WeightMismatch when it answers another version."""
    with run.clock.stage("sync"):
        report = proved_sync(run)
    version = run.policy.weights().version
    if report.version != version:
        raise WeightMismatch(f"sync ended at version {report.version}, the policy is at {version}")
    return report


def draw_prompts(run: Run, step: int) -> list[Prompt]:
    """The prompts of rollout batch `step`: the same on every rank, each occurrence with an id of its own."""
    return run.task.prompts(step, run.config.train.prompts_per_step)


def training_sampling(run: Run, step: int) -> SamplingParams:
    """Sampling of rollout batch `step`: the configuration's, with a seed of its own per step."""
    rollout, train = run.config.rollout, run.config.train
    return SamplingParams(
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
        stop_token_ids=run.stop_token_ids,
        top_p=rollout.top_p,
        samples_per_prompt=train.samples_per_prompt,
        seed=run.config.seed * 1_000_003 + step,
    )


def roll_out(run: Run, prompts: Sequence[Prompt], step: int) -> list[Completion]:
    """One group of samples per prompt, drawn by the engine; the same list on every rank."""
    sampling = training_sampling(run, step)
    with run.clock.stage("rollout"):
        rows = ask_engine(run, lambda engine: [asdict(c) for c in engine.generate(prompts, sampling)])
    return [received(row) for row in rows]


def received(row: dict[str, Any]) -> Completion:
    """A completion from its builtins."""
    routes = row["routes"]
    return Completion(**{**row, "routes": None if routes is None else EncodedRoutes(**routes)})


def score(run: Run, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[Score]:
    """The task's verdict on every completion, and the reward function's where there is one; the same on every rank."""
    with run.clock.stage("score"):
        rows = on_rank0(lambda: [asdict(s) for s in score_completions(run.task, prompts, completions, run.reward)])
    return [Score(**row) for row in rows]


def fill_up(
    run: Run, step: int, prompts: list[Prompt], completions: list[Completion], scores: list[Score]
) -> tuple[list[Prompt], list[Completion], list[Score]]:
    """What was drawn, and further rounds of it until selection has the groups it asks for or its rounds are spent.

    Round k of step s draws as step s + k x train.steps would: the same prompts and seeds on every rank, used nowhere else.
    """
    train, selection = run.config.train, run.config.algorithm.selection
    for extra in range(1, selection.max_rounds):
        if enough([c.prompt_id for c in completions], scores, train.prompts_per_step, selection):
            break
        more = draw_prompts(run, step + extra * train.steps)
        answers = roll_out(run, more, step + extra * train.steps)
        prompts, completions, scores = prompts + more, completions + answers, scores + score(run, more, answers)
    return prompts, completions, scores


def advantages(
    run: Run, prompts: Sequence[Prompt], completions: Sequence[Completion], scores: Sequence[Score], step: int
) -> PlannedUpdates:
    """Completions checked against what was sent, advantages by group, updates of whole groups with all they carry.

    Raises StaleRollout for a completion of other weights; ValueError for a lost, doubled or altered sample.
    """
    config, train = run.config, run.config.train
    rest(run)
    selection, lengths = config.algorithm.selection, [len(completion.token_ids) for completion in completions]
    paid = with_length_penalty(scores, lengths, selection, config.rollout.max_tokens)
    rollout = build_rollout_batch(
        prompts,
        completions,
        shuffled(paid, config.seed, step) if train.shuffle_rewards else paid,
        algorithm=config.algorithm,
        version=run.policy.weights().version,
        samples_per_prompt=train.samples_per_prompt,
    )
    router = config.router
    if router.mode is RouterMode.replay and router.replay_from is ReplaySource.rollout and rollout.tokens.routes is None:
        raise ValueError("router.mode=replay from the rollout, but its completions came without routes")
    chosen = select_groups(rollout.prompt_ids, scores, train.prompts_per_step, selection)
    parts = split_updates(rollout.prompt_ids, train.updates_per_batch, seed=config.seed, step=step, keep=chosen.prompt_ids)
    updates = [train_batch(rollout, part, config.algorithm, old=None) for part in parts]
    ready = with_reference(run, with_old_logprobs(run, updates))
    finished = tuple(with_correction(with_kl_reward(batch, config.algorithm), config.algorithm) for batch in ready)
    return PlannedUpdates(replace(rollout, facts=chosen.facts), finished, step)


def shuffled(scores: Sequence[Score], seed: int, step: int) -> list[Score]:
    """The control: the batch's scores dealt to its scored samples at random, a function of (seed, step)."""
    places = [place for place, score in enumerate(scores) if score.failure is None]
    dealt = [scores[place] for place in places]
    random.Random(f"{seed}/{step}/shuffled-rewards").shuffle(dealt)
    given = dict(zip(places, dealt, strict=True))
    return [replace(given.get(place, score), truncated=score.truncated) for place, score in enumerate(scores)]


def with_old_logprobs(run: Run, updates: Sequence[TrainBatch]) -> tuple[TrainBatch, ...]:
    """`old` of every update that needs it, from one no-grad forward per update before the first optimizer step.

    The first update is its own `old`: its forward runs at the weights that sampled it. Not where the training forward
    is jittered (there every update gets `old` from a clean pass), nor where the update itself is made from `old`. Where the
    trainer itself sampled, what it recorded is its `old` pass; but a pass whose routes are replayed must have kept them.
    """
    if run.own_sampler is not None and run.config.router.mode is not RouterMode.replay:
        return tuple(replace(update, old_logprobs=update.sampler_logprobs) for update in updates)
    always = run.config.router.mode is RouterMode.jitter or needs_old(run.config.algorithm)
    ready: list[TrainBatch] = []
    with run.clock.stage("old"):
        for index, update in enumerate(updates):
            if index == 0 and not always:
                ready.append(update)
            else:
                values = run.policy.logprobs(update.tokens, Pass.OLD)
                tokens = update.tokens if values.routes is None else replace(update.tokens, routes=values.routes)
                ready.append(replace(update, tokens=tokens, old_logprobs=values.logprobs))
    return tuple(ready)


def with_reference(run: Run, updates: Sequence[TrainBatch]) -> tuple[TrainBatch, ...]:
    """The reference's log-probs of every update, where a KL term asks for them."""
    if run.reference is None:
        return tuple(updates)
    with run.clock.stage("reference"):
        values = [run.reference.logprobs(update.tokens, Pass.REFERENCE).logprobs for update in updates]
    return tuple(replace(update, reference_logprobs=found) for update, found in zip(updates, values, strict=True))


def update(run: Run, planned: PlannedUpdates) -> list[UpdateReport]:
    """One optimizer step per planned update, in order; what making an update found out is reported with it."""
    with run.clock.stage("update"):
        return [_one_update(run, planned, index) for index in range(len(planned.updates))]


def _one_update(run: Run, planned: PlannedUpdates, index: int) -> UpdateReport:
    batch, algorithm = planned.updates[index], run.config.algorithm
    if algorithm.clip_cov.fraction:
        # Chosen by the policy about to be updated: the first update's is the one that sampled.
        known = batch.old_logprobs if index == 0 else None
        current = run.policy.logprobs(batch.tokens, Pass.OLD).logprobs if known is None else known
        batch = with_chosen_tokens(batch, current, algorithm, seed=run.config.seed, step=planned.step)
    report = run.policy.update(batch)
    return replace(report, metrics={**report.metrics, **batch.facts})


def record(run: Run, step: int, outcome: StepOutcome) -> None:
    """Metrics and rollouts of the step to every sink, on rank 0. Raises before logging when a number is lost."""
    metrics = step_metrics(outcome, run.clock.take_step(), run.config.algorithm) | engine_metrics(run)
    run.log_rows.append(metrics)
    run.sinks.log_step(step, metrics)
    records = rollout_records(outcome)
    run.sinks.log_rollouts(step, records)
    audit_step(run, step, outcome, records)
    reason = early_kill_reason(run.log_rows, run.config.data_gate)
    if reason is not None:
        raise StopRun(reason)
