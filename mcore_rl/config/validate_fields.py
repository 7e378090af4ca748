"""What can be wrong with a configuration by itself: no model and no device is looked at, and no file but rollout.url_file."""

from __future__ import annotations

import math
import re
from pathlib import Path

from mcore_rl.config.requirement import at_least, drawable, positive, require
from mcore_rl.config.schema import DType, EngineKind, LrSchedule, OptimizerConfig, Placement, ReplaySource, RouterMode, RunConfig
from mcore_rl.config.validate_reward import validate_data_gate, validate_reward, validate_task_fields
from mcore_rl.rollout.addresses import check_urls, read_url_file

MAX_SEED = 2**32 - 1
WANDB_MODES = ("offline", "online", "disabled")
BF16_PROBE_FLOOR_NATS = 1e-2


def validate_fields(config: RunConfig) -> None:
    """ValueError naming key, value and what would be right, for the first field that cannot work."""
    _run(config)
    _train(config)
    _rollout(config)
    _sync(config)
    _router(config)
    _optimizer(
        "optimizer",
        config.optimizer,
        ("train.steps x train.updates_per_batch", config.train.steps * config.train.updates_per_batch),
    )
    _optimizer("sft.optimizer", config.sft.optimizer, ("sft.steps", config.sft.steps))
    _sft(config)
    _evaluation(config)
    validate_reward(config.reward)
    validate_data_gate(config.data_gate)
    validate_task_fields(config.task, config.reward)


def _run(config: RunConfig) -> None:
    require(
        config.resume is None,
        f"resume={config.resume}",
        "continuing a run is not available: runs write no training checkpoints yet",
    )
    require(
        re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name) is not None,
        f"name={config.name!r}",
        "a folder name of letters, digits, '.', '_' and '-' is needed",
    )
    require(0 <= config.seed <= MAX_SEED, f"seed={config.seed}", f"a whole number from 0 to {MAX_SEED} is needed")
    mode = config.telemetry.wandb
    require(mode in WANDB_MODES, f"telemetry.wandb={mode}", f"one of {', '.join(WANDB_MODES)}")
    telemetry = config.telemetry
    at_least(
        0, [("telemetry.rollouts_logged", telemetry.rollouts_logged), ("telemetry.audited_groups", telemetry.audited_groups)]
    )


def _train(config: RunConfig) -> None:
    train = config.train
    sizes = [("steps", train.steps), ("prompts_per_step", train.prompts_per_step)]
    sizes += [("samples_per_prompt", train.samples_per_prompt), ("updates_per_batch", train.updates_per_batch)]
    at_least(1, [(f"train.{name}", value) for name, value in sizes])
    require(
        train.prompts_per_step % train.updates_per_batch == 0,
        f"train.updates_per_batch={train.updates_per_batch}",
        f"must divide train.prompts_per_step={train.prompts_per_step}: every update takes whole groups",
    )


def _own_sampler(config: RunConfig) -> None:
    """What rollout.engine=trainer leaves without a meaning."""
    rollout, router = config.rollout, config.router
    own = rollout.engine is EngineKind.trainer
    require(not own or rollout.placement is Placement.owned, "rollout.placement=url", "rollout.engine=trainer asks no server")
    require(not own or rollout.engines == 1, f"rollout.engines={rollout.engines}", "rollout.engine=trainer is one sampler")
    level = rollout.sleep_level
    require(not own or level == 0, f"rollout.sleep_level={level}", "rollout.engine=trainer has no memory of its own to give back")
    recorded = router.mode is RouterMode.replay and router.replay_from is ReplaySource.rollout
    require(
        not (own and recorded),
        "router.replay_from=rollout",
        "rollout.engine=trainer routes as it trains: use router.replay_from=old",
    )


def _rollout(config: RunConfig) -> None:
    rollout = config.rollout
    _own_sampler(config)
    owned = rollout.placement is Placement.owned
    by_file = rollout.url_file is not None
    require(owned or by_file or bool(rollout.url), "rollout.placement=url", "needs rollout.url=[http://host:port]")
    require(not (owned and rollout.url), f"rollout.url={rollout.url}", "is read with rollout.placement=url only")
    require(not (owned and by_file), f"rollout.url_file={rollout.url_file}", "is read with rollout.placement=url only")
    require(not (by_file and rollout.url), f"rollout.url={rollout.url}", "rollout.url_file lists the servers")
    require(owned or rollout.engines == 1, f"rollout.engines={rollout.engines}", "is read with rollout.placement=owned only")
    check_urls([(f"rollout.url={url}", url) for url in rollout.url])
    if rollout.url_file is not None:
        read_url_file(Path(rollout.url_file))
    at_least(0, [("rollout.max_engine_restarts", rollout.max_engine_restarts)])
    sizes = [
        ("engines", rollout.engines),
        ("tensor_parallel", rollout.tensor_parallel),
        ("max_tokens", rollout.max_tokens),
        ("max_num_seqs", rollout.max_num_seqs),
    ]
    sizes += [("kv_cache_gib", rollout.kv_cache_gib), ("threads", rollout.threads)]
    at_least(1, [(f"rollout.{name}", value) for name, value in sizes])
    positive([("rollout.start_timeout_s", rollout.start_timeout_s), ("rollout.request_timeout_s", rollout.request_timeout_s)])
    share = rollout.gpu_memory_utilization
    require(0.0 < share <= 1.0, f"rollout.gpu_memory_utilization={share}", "a share in (0, 1] is needed")
    require(
        rollout.max_tokens < rollout.max_model_len,
        f"rollout.max_model_len={rollout.max_model_len}",
        f"must be larger than rollout.max_tokens={rollout.max_tokens}: the prompt is part of it",
    )
    _sampling(config)


def _sampling(config: RunConfig) -> None:
    rollout, samples = config.rollout, config.train.samples_per_prompt
    require(
        rollout.temperature > 0.0 or samples == 1,
        f"rollout.temperature={rollout.temperature}",
        f"train.samples_per_prompt={samples} greedy samples of a prompt are all the same; use rollout.temperature=1.0",
    )
    why = "the trainer's log-probs are of the whole distribution at temperature 1, so samples must be too; use 1.0"
    require(rollout.temperature == 1.0, f"rollout.temperature={rollout.temperature}", why)
    require(rollout.top_p == 1.0, f"rollout.top_p={rollout.top_p}", why)
    budget = config.layout.tokens_per_micro_batch
    require(
        budget >= rollout.max_model_len,
        f"layout.tokens_per_micro_batch={budget}",
        f"must hold one sequence of rollout.max_model_len={rollout.max_model_len} tokens",
    )


def _sync(config: RunConfig) -> None:
    sync = config.sync
    at_least(1, [("sync.bucket_bytes", sync.bucket_bytes), ("sync.probe_sequences", sync.probe_sequences)])
    at_least(1, [("sync.readback_every", sync.readback_every)])
    at_least(0, [("sync.max_resyncs", sync.max_resyncs)])
    positive([("sync.probe_max_nats", sync.probe_max_nats)])
    if sync.probe_mean_nats is not None:
        positive([("sync.probe_mean_nats", sync.probe_mean_nats)])
    coarse = DType.bfloat16 in (config.rollout.dtype, config.model.dtype)
    require(
        not coarse or sync.probe_max_nats >= BF16_PROBE_FLOOR_NATS,
        f"sync.probe_max_nats={sync.probe_max_nats}",
        f"bfloat16 kernels alone differ by more; use sync=bf16 or a bound of at least {BF16_PROBE_FLOOR_NATS}",
    )


def _router(config: RunConfig) -> None:
    router = config.router
    jitter = router.mode is RouterMode.jitter
    require(
        not jitter or 0.0 < router.jitter_eps < 1.0,
        f"router.jitter_eps={router.jitter_eps}",
        "router.mode=jitter needs 0 < eps < 1",
    )
    require(
        jitter or router.jitter_eps == 0.0,
        f"router.jitter_eps={router.jitter_eps}",
        f"is read with router.mode=jitter only; mode is {router.mode.name}",
    )
    replay = router.mode is RouterMode.replay
    require(
        replay or router.replay_from is ReplaySource.rollout,
        f"router.replay_from={router.replay_from.name}",
        f"is read with router.mode=replay only; mode is {router.mode.name}",
    )
    require(
        not replay or router.replay_from is ReplaySource.old or config.rollout.enforce_eager,
        "rollout.enforce_eager=false",
        "routes are read off the engine's routers as it runs them: router.mode=replay needs enforce_eager=true",
    )
    for key, value in (("router.aux_loss_coef", router.aux_loss_coef), ("sft.aux_loss_coef", config.sft.aux_loss_coef)):
        require(math.isfinite(value) and value >= 0.0, f"{key}={value}", "must not be negative")


def _optimizer(key: str, optimizer: OptimizerConfig, steps: tuple[str, int]) -> None:
    """steps: how many there will be, and what says so; none are asked for when it is 0."""
    require(
        math.isfinite(optimizer.lr) and optimizer.lr >= 0.0,
        f"{key}.lr={optimizer.lr}",
        "a finite number, not negative, is needed",
    )
    for name, beta in (("beta1", optimizer.beta1), ("beta2", optimizer.beta2)):
        require(0.0 <= beta < 1.0, f"{key}.{name}={beta}", "must lie in [0, 1)")
    share = optimizer.min_lr_ratio
    require(0.0 <= share <= 1.0, f"{key}.min_lr_ratio={share}", "a share of lr in [0, 1] is needed")
    positive([(f"{key}.eps", optimizer.eps), (f"{key}.clip_grad", optimizer.clip_grad)])
    require(optimizer.weight_decay >= 0.0, f"{key}.weight_decay={optimizer.weight_decay}", "must not be negative")
    at_least(0, [(f"{key}.warmup_steps", optimizer.warmup_steps)])
    cosine = optimizer.schedule is LrSchedule.cosine and steps[1] > 0
    require(
        not cosine or optimizer.warmup_steps < steps[1],
        f"{key}.warmup_steps={optimizer.warmup_steps}",
        f"{key}.schedule=cosine needs fewer than the {steps[1]} steps of {steps[0]}",
    )


def _sft(config: RunConfig) -> None:
    sft = config.sft
    at_least(0, [("sft.steps", sft.steps), ("sft.first_check_step", sft.first_check_step)])
    sizes = [("batch_size", sft.batch_size), ("check_every", sft.check_every), ("check_prompts", sft.check_prompts)]
    at_least(1, [(f"sft.{name}", value) for name, value in sizes])
    require(
        0.0 <= sft.min_accuracy <= sft.max_accuracy <= 1.0,
        f"sft.min_accuracy={sft.min_accuracy}",
        f"must lie between 0 and sft.max_accuracy={sft.max_accuracy}, which must not exceed 1",
    )
    require(0.0 <= sft.min_format <= 1.0, f"sft.min_format={sft.min_format}", "a share in [0, 1] is needed")
    if sft.steps:
        require(
            sft.first_check_step <= sft.steps,
            f"sft.first_check_step={sft.first_check_step}",
            f"is after sft.steps={sft.steps}: never checked",
        )


def _evaluation(config: RunConfig) -> None:
    at_least(1, [("eval.prompts", config.eval.prompts)])
    drawable([("eval.prompts", config.eval.prompts), ("sft.check_prompts", config.sft.check_prompts)])
    drawable([("distill.gate_prompts", config.distill.gate_prompts)])
    at_least(100, [("eval.bootstrap_samples", config.eval.bootstrap_samples)])
