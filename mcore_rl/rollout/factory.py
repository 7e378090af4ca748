"""From a configuration to the rollout engines it names. Rank 0 only; returns while owned engines are still starting."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.config.device import uses_cuda
from mcore_rl.config.schema import EngineKind, Placement, ReplaySource, RolloutConfig, RouterMode, RunConfig
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.fleet import Fleet
from mcore_rl.rollout.link import EngineLink
from mcore_rl.rollout.route_reader import RouteReader
from mcore_rl.rollout.supply import EngineSupply, OwnedSupply, UrlSupply
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.rollout.vllm_url import UrlLink


def start_engine(config: RunConfig, model_path: Path, log_folder: Path) -> Fleet:
    """The engines of `config.rollout`. ValueError for a kind or placement that does not exist (yet)."""
    rollout = config.rollout
    if rollout.engine is not EngineKind.vllm:
        raise ValueError(f"rollout.engine={rollout.engine.value}: only vllm is available")
    owned = rollout.placement is Placement.owned
    supply = _owned(config, model_path, log_folder) if owned else _by_url(config)
    return Fleet(supply, max_restarts=rollout.max_engine_restarts)


def records_routes(config: RunConfig) -> bool:
    """Whether completions must bring the experts of their tokens (R3)."""
    return config.router.mode is RouterMode.replay and config.router.replay_from is ReplaySource.rollout


def _device(config: RunConfig) -> str:
    return "cuda" if uses_cuda(config.device) else "cpu"


def _owned(config: RunConfig, model_path: Path, log_folder: Path) -> EngineSupply:
    rollout, device = config.rollout, _device(config)

    def start(index: int) -> VllmEngine:
        link = OwnedLink(
            engine_arguments(rollout, str(model_path), device=device, routes=records_routes(config)),
            engine_environment(rollout, device=device),
            log_path=log_folder / f"engine{index}.log",
            start_timeout_s=rollout.start_timeout_s,
            request_timeout_s=rollout.request_timeout_s,
        )
        return _engine(config, link)

    return OwnedSupply(rollout.engines, start)


def _by_url(config: RunConfig) -> EngineSupply:
    rollout = config.rollout
    url_file = None if rollout.url_file is None else Path(rollout.url_file)
    return UrlSupply(
        lambda url: _engine(config, _url_link(rollout, url)), urls=rollout.url, url_file=url_file, wait_s=rollout.start_timeout_s
    )


def _url_link(rollout: RolloutConfig, url: str) -> UrlLink:
    return UrlLink(
        url,
        start_timeout_s=rollout.start_timeout_s,
        request_timeout_s=rollout.request_timeout_s,
        max_connections=rollout.max_num_seqs,
    )


def _engine(config: RunConfig, link: EngineLink) -> VllmEngine:
    reader = RouteReader(link, native=_device(config) == "cuda") if records_routes(config) else None
    rollout = config.rollout
    return VllmEngine(link, max_model_len=rollout.max_model_len, routes=reader, sleep_level=rollout.sleep_level)
