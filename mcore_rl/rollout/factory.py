"""From a configuration to the rollout engine it names. Rank 0 only; returns while an owned engine is still starting."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rl.config.schema import Device, EngineKind, Placement, ReplaySource, RolloutConfig, RouterMode, RunConfig
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.link import EngineLink
from mcore_rl.rollout.route_reader import RouteReader
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.rollout.vllm_url import UrlLink


def start_engine(config: RunConfig, model_path: Path, log_folder: Path) -> VllmEngine:
    """The engine of `config.rollout`. ValueError for a kind or placement that does not exist (yet)."""
    rollout = config.rollout
    if rollout.engine is not EngineKind.vllm:
        raise ValueError(f"rollout.engine={rollout.engine.value}: only vllm is available")
    owned = rollout.placement is Placement.owned
    link = _owned(config, model_path, log_folder) if owned else _by_url(rollout)
    reader = RouteReader(link, native=_device(config) == "cuda") if records_routes(config) else None
    return VllmEngine(link, max_model_len=rollout.max_model_len, routes=reader)


def records_routes(config: RunConfig) -> bool:
    """Whether completions must bring the experts of their tokens (R3)."""
    return config.router.mode is RouterMode.replay and config.router.replay_from is ReplaySource.rollout


def _device(config: RunConfig) -> str:
    cuda = config.device is Device.cuda or (config.device is Device.auto and torch.cuda.is_available())
    return "cuda" if cuda else "cpu"


def _owned(config: RunConfig, model_path: Path, log_folder: Path) -> EngineLink:
    rollout, device = config.rollout, _device(config)
    return OwnedLink(
        engine_arguments(rollout, str(model_path), device=device, routes=records_routes(config)),
        engine_environment(rollout, device=device),
        log_path=log_folder / "engine0.log",
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
    )


def _by_url(rollout: RolloutConfig) -> EngineLink:
    if len(rollout.url) != 1:
        raise ValueError(f"rollout.placement=url needs exactly one rollout.url for now, got {rollout.url}")
    return UrlLink(
        rollout.url[0],
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        max_connections=rollout.max_num_seqs,
    )
