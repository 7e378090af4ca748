"""From a validated configuration to the parts of a run on this rank. Collective over the trainer's ranks.

The order matters only for time: rank 0's engine starts while Megatron is built.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from megatron.core.models.gpt import GPTModel

from mcore_rl.config.compose import resolved_yaml
from mcore_rl.config.layout import parallel_layout
from mcore_rl.config.schema import EngineKind, RunConfig
from mcore_rl.data.build import BuiltTask, build_task
from mcore_rl.data.tokenizer import load_tokenizer, stop_token_ids
from mcore_rl.policy_sampler import TrainerSampler
from mcore_rl.progress import Progress
from mcore_rl.rewards.user_reward import UserReward
from mcore_rl.rollout.factory import start_engine
from mcore_rl.rollout.fleet import Fleet
from mcore_rl.rollout.match import trainer_facts
from mcore_rl.run_folder import RunFolder, run_folder
from mcore_rl.telemetry.fanout import FanOut
from mcore_rl.telemetry.jsonl_sink import JsonlSink
from mcore_rl.telemetry.wandb_sink import WandbSink
from mcore_rl.tiny_model import build_tiny
from models.build import BuildOptions, build_model
from models.delta_net_kernel import preflight
from models.registry import read_spec
from models.router_policy import RouterPolicy
from models.spec import ModelSpec
from models.weights import load_hf_weights
from parallel.collectives import on_rank0
from parallel.groups import ProcessGroups, destroy_groups, initialize_groups
from parallel.runtime import Runtime, start_runtime, stop_runtime


@dataclass(frozen=True)
class Trainer:
    """Megatron on this rank: the model chunks with the checkpoint's weights, and where they live."""

    runtime: Runtime
    spec: ModelSpec
    groups: ProcessGroups
    chunks: list[GPTModel]


@dataclass(frozen=True)
class Parts:
    """What every stage is built from. The engine exists on rank 0 only and may still be starting; so does `reward`, the
    function of the user's where one is configured. own_sampler: on every rank, where the trainer samples itself.
    """

    config: RunConfig
    folder: RunFolder
    model_path: Path
    task: BuiltTask
    stop_token_ids: tuple[int, ...]
    trainer: Trainer
    engine: Fleet | TrainerSampler | None
    own_sampler: TrainerSampler | None = None
    reward: UserReward | None = None


@contextmanager
def assembled(config: RunConfig) -> Iterator[Parts]:
    """The parts of a run, taken down again on every way out: engine first, process groups last."""
    with ExitStack() as stack:
        runtime = start_runtime(config.device.value)
        stack.callback(stop_runtime)
        folder = run_folder(config)
        model_path = Path(on_rank0(lambda: str(prepare_model(config, folder))))
        own = TrainerSampler(max_model_len=config.rollout.max_model_len) if config.rollout.engine is EngineKind.trainer else None
        engine = (own or start_engine(config, model_path, folder.logs)) if runtime.rank == 0 else None
        if engine is not None:
            stack.callback(engine.close)
        tokenizer = load_tokenizer(model_path)
        task = build_task(
            config.task,
            tokenizer,
            seed=config.seed,
            reward=config.reward,
            template_kwargs=config.model.chat_template_kwargs,
            max_prompt_tokens=config.rollout.max_model_len - config.rollout.max_tokens,
        )
        groups = initialize_groups(parallel_layout(config.layout), config.seed)
        stack.callback(destroy_groups)
        trainer = build_trainer(config, model_path, runtime, groups)
        if isinstance(engine, Fleet):
            engine.expect(trainer_facts(trainer.spec, model_path, config.rollout), folder.logs / "engine_match.txt")
        reward = UserReward(config.reward, folder.logs / "reward.log") if config.reward.function and engine else None
        if reward is not None:
            stack.callback(reward.close)
        yield Parts(config, folder, model_path, task, stop_token_ids(tokenizer), trainer, engine, own, reward)


def prepare_model(config: RunConfig, folder: RunFolder) -> Path:
    """The Hugging Face folder to train: the given one, or a small random model made in the run folder."""
    if config.model.path is not None:
        return Path(config.model.path)
    if config.model.build is None:
        raise ValueError("model.path and model.build are both unset: name a Hugging Face folder or choose a model group")
    return build_tiny(folder.root / "model", config.model.build, config.seed)


def build_trainer(config: RunConfig, model_path: Path, runtime: Runtime, groups: ProcessGroups) -> Trainer:
    """Megatron's modules on this rank with the checkpoint's weights in them."""
    spec = read_spec(model_path)
    if spec.delta_net is not None and runtime.device.type == "cuda":
        preflight(runtime.device)
    options = BuildOptions(
        dtype=getattr(torch, config.model.dtype.value),
        impl=config.model.impl.value,
        device=runtime.device,
        recompute=config.model.recompute,
        router=RouterPolicy(
            mode=config.router.mode.value,
            jitter_eps=config.router.jitter_eps,
            seed=config.seed,
            replay_from=config.router.replay_from.value,
        ),
    )
    chunks = build_model(spec, groups, options)
    load_hf_weights(chunks, spec, groups, model_path)
    return Trainer(runtime, spec, groups, chunks)


def open_sinks(config: RunConfig, folder: RunFolder, progress: Progress | None, *, is_rank0: bool) -> FanOut:
    """Where metrics go: nowhere on the other ranks; files, wandb and the screen on rank 0."""
    if not is_rank0 or progress is None:
        return FanOut(())
    telemetry = config.telemetry
    files = JsonlSink(folder.root, max_rollouts=telemetry.rollouts_logged)
    if telemetry.wandb == "disabled":
        return FanOut((files, progress))
    wandb = WandbSink(
        folder.root,
        mode=telemetry.wandb,
        project=telemetry.wandb_project,
        name=config.name,
        config=yaml.safe_load(resolved_yaml(config)),
    )
    return FanOut((files, wandb, progress))
