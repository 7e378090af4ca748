"""From a configuration to the rollout engine it names. Rank 0 only; returns while an owned engine is still starting."""

from __future__ import annotations

from pathlib import Path

import torch

from mcore_rl.config.schema import Device, EngineKind, Placement, RunConfig
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink


def start_engine(config: RunConfig, model_path: Path, log_folder: Path) -> VllmEngine:
    """The engine of `config.rollout`. ValueError for a kind or placement that does not exist (yet)."""
    rollout = config.rollout
    if rollout.engine is not EngineKind.vllm:
        raise ValueError(f"rollout.engine={rollout.engine.value}: only vllm is available")
    if rollout.placement is not Placement.owned:
        raise ValueError(f"rollout.placement={rollout.placement.value}: only owned is available")
    cuda = config.device is Device.cuda or (config.device is Device.auto and torch.cuda.is_available())
    device = "cuda" if cuda else "cpu"
    link = OwnedLink(
        engine_arguments(rollout, str(model_path), device=device),
        engine_environment(rollout, device=device),
        log_path=log_folder / "engine0.log",
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
    )
    return VllmEngine(link, max_model_len=rollout.max_model_len)
