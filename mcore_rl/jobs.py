"""What the commands do once the configuration is valid and this process is a rank: train, sft, eval, probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType

from mcore_rl.algorithms.losses import LossFunction, policy_loss, sft_loss
from mcore_rl.assemble import Parts, assembled, open_sinks
from mcore_rl.config.schema import RunConfig
from mcore_rl.data_probe import probe_pass_rates
from mcore_rl.facts import record_manifest, require_band_of_model, weights_digest
from mcore_rl.finish import Outcome, close_run, export
from mcore_rl.held_out import look
from mcore_rl.loop import train
from mcore_rl.policy import MegatronPolicy, PolicySettings
from mcore_rl.policy_reference import ReferencePolicy, held_reference
from mcore_rl.probe import probe_batch
from mcore_rl.progress import Progress
from mcore_rl.rollout.fleet import Fleet
from mcore_rl.run import Run
from mcore_rl.seams import Policy
from mcore_rl.sft import warm_up
from mcore_rl.stages import sync
from mcore_rl.summary import COMPLETED
from mcore_rl.sync.session import WeightSync
from mcore_rl.telemetry.audit_log import AuditLog
from parallel.collectives import on_rank0


def run_train(config: RunConfig) -> None:
    """Warm-up if configured, held-out look, RL, held-out look, export, report. Collective."""
    with opened(config) as (parts, run, outcome):
        if config.sft.steps:
            supervised(parts, run, outcome)
            run.policy = rl_policy(parts)
        run.reference = kl_reference(parts, run.policy)
        announce(run, "held-out evaluation")
        sync(run)
        outcome.before = look(run, "before RL")
        announce(run, "training", config.train.steps)
        run.clock.take_step()
        train(run)
        outcome.after = look(run, "after RL")
        announce(run, "export")
        export(parts, run, outcome)


def run_sft(config: RunConfig) -> None:
    """The supervised warm-up alone, evaluated and exported. ValueError when sft.steps is 0."""
    if config.sft.steps == 0:
        raise ValueError("sft.steps=0: there is nothing to train; set it, or choose an experiment that has a warm-up")
    with opened(config) as (parts, run, outcome):
        supervised(parts, run, outcome)
        outcome.after = look(run, "after the warm-up")
        export(parts, run, outcome)


def run_eval(config: RunConfig) -> None:
    """The held-out evaluation of the configured model alone, with its weights proved in the engine first."""
    with opened(config) as (_, run, outcome):
        sync(run)
        outcome.before = look(run, "as it is")


def run_probe(config: RunConfig) -> None:
    """The pass-rate probe of the configured model on training prompts: buckets, band file, launch rule."""
    with opened(config) as (parts, run, _):
        sync(run)
        announce(run, "pass-rate probe", config.data_gate.prompts)
        probe_pass_rates(run, parts.task, on_rank0(lambda: weights_digest(parts.model_path)))


@contextmanager
def opened(
    config: RunConfig,
    make_policy: Callable[[Parts], MegatronPolicy] | None = None,
    facts: Callable[[RunConfig], dict[str, object]] | None = None,
) -> Iterator[tuple[Parts, Run, Outcome]]:
    """A run ready to train, whose summary and report are written on every way out.

    make_policy: the first policy; None: a warm-up's where one is configured, else that of RL. facts: of the stage, for the
    manifest.
    """
    with ExitStack() as stack:
        parts = stack.enter_context(assembled(config))
        progress = Progress(config.train.steps, enabled=config.telemetry.progress) if parts.engine is not None else None
        first = supervised_policy if config.sft.steps else rl_policy
        policy = (make_policy or first)(parts)
        run, outcome = make_run(parts, policy, progress), Outcome()

        def leave(kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
            if parts.engine is not None:
                close_run(run, outcome, exit_reason=reason(error), completed=kind is None)

        stack.push(leave)
        if parts.engine is not None:
            record_manifest(parts, run, policy.optimizer_name, facts(config) if facts else {})
            require_band_of_model(parts)
        yield parts, run, outcome


def reason(error: BaseException | None) -> str:
    """How the run ended, in one line."""
    if error is None:
        return COMPLETED
    return f"{type(error).__name__}: {' '.join(str(error).split())}" if str(error) else type(error).__name__


def make_run(parts: Parts, policy: MegatronPolicy, progress: Progress | None) -> Run:
    """The run around its first policy (a warm-up's, or the RL policy at once)."""
    config = parts.config
    probe = probe_batch(parts.task, config.sync.probe_sequences, config.rollout.max_model_len - 1)
    fleet = parts.engine if isinstance(parts.engine, Fleet) else None
    run = Run(
        config=config,
        folder=parts.folder,
        task=parts.task,
        policy=policy,
        weight_sync=WeightSync(fleet, config.sync, probe_sequences=[ids.tolist() for ids in probe.token_ids]),
        probe=probe,
        stop_token_ids=parts.stop_token_ids,
        extraction=parts.task.grader.mode,
        reward_version=reward_version(parts),
        sinks=open_sinks(config, parts.folder, progress, is_rank0=parts.engine is not None),
        progress=progress,
        engine=parts.engine,
        fleet=fleet,
        own_sampler=parts.own_sampler,
        reward=parts.reward,
        audit=AuditLog(parts.folder.audit) if parts.engine is not None else None,
    )
    if parts.own_sampler is not None:
        parts.own_sampler.follow(lambda: own_policy(run))
    return run


def own_policy(run: Run) -> MegatronPolicy:
    """The policy of the moment, for the sampler that is its modules. TypeError for one that is no MegatronPolicy."""
    if not isinstance(run.policy, MegatronPolicy):
        raise TypeError(f"rollout.engine=trainer samples from a MegatronPolicy, not from {type(run.policy).__name__}")
    return run.policy


def reward_version(parts: Parts) -> str:
    """What an answer earns, by name: the grader's composition, and the reward function's file where there is one."""
    built_in = parts.task.grader.reward_version
    return built_in if parts.reward is None else f"{built_in}/{parts.reward.version}"


def supervised(parts: Parts, run: Run, outcome: Outcome) -> None:
    """The warm-up, from its announcement to its passed gate."""
    announce(run, "supervised warm-up", parts.config.sft.steps)
    outcome.gate = warm_up(run)


def supervised_policy(parts: Parts) -> MegatronPolicy:
    """The warm-up's policy: likelihood loss, its own optimizer, versions counting up to 0."""
    sft = parts.config.sft
    settings = PolicySettings(
        loss=sft_loss,
        optimizer=sft.optimizer,
        total_steps=sft.steps,
        tokens_per_micro_batch=parts.config.layout.tokens_per_micro_batch,
        first_version=-sft.steps,
        aux_loss_coef=sft.aux_loss_coef,
    )
    return MegatronPolicy(parts.trainer.chunks, parts.trainer.spec, parts.trainer.groups, settings)


def rl_policy(parts: Parts) -> MegatronPolicy:
    """The RL policy at version 0."""
    return sampled_policy(parts, policy_loss(parts.config.algorithm))


def sampled_policy(parts: Parts, loss: LossFunction) -> MegatronPolicy:
    """A policy that learns from its own samples, at version 0: fresh optimizer over the chunks as they are."""
    config = parts.config
    settings = PolicySettings(
        loss=loss,
        optimizer=config.optimizer,
        total_steps=config.train.steps * config.train.updates_per_batch,
        tokens_per_micro_batch=config.layout.tokens_per_micro_batch,
        aux_loss_coef=config.router.aux_loss_coef,
        temperature=config.rollout.temperature,
    )
    return MegatronPolicy(parts.trainer.chunks, parts.trainer.spec, parts.trainer.groups, settings)


def kl_reference(parts: Parts, policy: Policy) -> ReferencePolicy | None:
    """What the KL term measures from, held from now on; None where there is no such term. Collective."""
    kl, trainer = parts.config.algorithm.kl, parts.trainer
    if not kl.coef:
        return None
    return ReferencePolicy(policy, held_reference(trainer.chunks, trainer.spec, trainer.groups, kl))


def announce(run: Run, name: str, total: int | None = None) -> None:
    """Say on rank 0 what begins now."""
    if run.progress is not None:
        run.progress.phase(name, total)
