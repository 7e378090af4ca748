"""Real vLLM engines on CPU, started once for the whole folder and at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hf_trainer
import pytest
import torch
from transformers import PreTrainedModel

from mcore_rl.config.schema import DType, RolloutConfig, SyncConfig
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.vllm_engine import VllmEngine
from mcore_rl.rollout.vllm_owned import OwnedLink
from mcore_rl.sync.session import WeightSync
from mcore_rl.types import SyncReport

EXTENSION = "damage.DamageExtension"
HERE = Path(__file__).resolve().parent


@dataclass
class Trained:
    """An engine and the stand-in trainer it is synced with."""

    engine: VllmEngine
    link: OwnedLink
    models: dict[str, PreTrainedModel]
    probe: list[list[int]]
    probe_max_nats: float = 1e-4
    fresh: list[list[float]] = field(default_factory=list)
    session: WeightSync = field(init=False)

    def __post_init__(self) -> None:
        self.renew()

    def ready(self) -> Trained:
        """Started; `fresh` is what the engine says of the probe before anything was synced."""
        self.engine.wait_ready()
        self.fresh = self.engine.score(self.probe)
        return self

    def renew(self, **overrides: Any) -> WeightSync:
        """A fresh session, whose first sync reads everything back."""
        config = SyncConfig(**{"bucket_bytes": 100_000, "probe_max_nats": self.probe_max_nats} | overrides)
        self.session = WeightSync(self.engine, config, probe_sequences=self.probe)
        return self.session

    def sync(self, which: str, version: int = 0) -> SyncReport:
        """Send model `which`."""
        return self.session.sync(self.source(which, version), lambda: self.trainer_logprobs(which))

    def source(self, which: str, version: int = 0) -> hf_trainer.HfSource:
        """The weights of model `which`."""
        return hf_trainer.HfSource(hf_trainer.hf_tensors(self.models[which]), version)

    def trainer_logprobs(self, which: str) -> list[list[float]]:
        """By transformers."""
        return hf_trainer.hf_logprobs(self.models[which], self.probe)

    def damage(self, kind: str, name: str) -> None:
        """Break the engine's side of the next syncs."""
        self.link.rpc("mcore_break", [kind, name])

    def heal(self) -> None:
        """End the damage."""
        self.link.rpc("mcore_heal", [])


def start(
    folder: Path, config: Any, rollout: RolloutConfig, *, std: float = 0.1, probe_max_nats: float = 1e-4, **arguments: Any
) -> Trained:
    """Save model `a` of this architecture, start an engine on it, and keep `a` and `b` as trainer weights."""
    models = {"a": hf_trainer.build(config, seed=1, std=std), "b": hf_trainer.build(config, seed=2, std=std)}
    path = hf_trainer.save(models["a"], folder / "model")
    environment = engine_environment(rollout, device="cpu")
    environment["PYTHONPATH"] = f"{HERE}:{environment['PYTHONPATH']}"
    link = OwnedLink(
        engine_arguments(rollout, str(path), device="cpu", extension=EXTENSION) | arguments,
        environment,
        log_path=folder / "engine.log",
        start_timeout_s=900,
        request_timeout_s=200,
    )
    engine = VllmEngine(link, max_model_len=rollout.max_model_len)
    return Trained(engine, link, models, hf_trainer.sequences(config.vocab_size), probe_max_nats)


@pytest.fixture(scope="session")
def starting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Trained]]:
    """Both owned engines, still starting."""
    torch.set_num_threads(1)
    rollout = RolloutConfig(max_num_seqs=64)
    engines = {
        # 256 tokens a step: prompts of a larger batch are prefilled in pieces.
        "moe": start(tmp_path_factory.mktemp("moe"), hf_trainer.moe_config(), rollout, max_num_batched_tokens=256),
        "dense": start(
            tmp_path_factory.mktemp("dense"), hf_trainer.dense_config(), rollout, enable_prefix_caching=True, block_size=32
        ),
    }
    yield engines
    for trained in engines.values():
        trained.engine.close()


@pytest.fixture(scope="session")
def moe_ready(starting: dict[str, Trained]) -> Trained:
    """Once per session: the MoE engine has started."""
    return starting["moe"].ready()


@pytest.fixture(scope="session")
def dense_ready(starting: dict[str, Trained]) -> Trained:
    """Once per session: the dense engine has started."""
    return starting["dense"].ready()


@pytest.fixture
def moe(moe_ready: Trained) -> Iterator[Trained]:
    """The MoE engine with a fresh session; damage ends with the test."""
    moe_ready.renew()
    yield moe_ready
    moe_ready.heal()


@pytest.fixture
def dense(dense_ready: Trained) -> Iterator[Trained]:
    """The dense engine (tied head) with a fresh session; damage ends with the test."""
    dense_ready.renew()
    yield dense_ready
    dense_ready.heal()


@pytest.fixture(scope="session")
def hybrid_ready(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A hybrid in bfloat16; the trainer's weights are float32. (vLLM's Qwen3.5 needs torchvision; Qwen3-Next does not.)"""
    torch.set_num_threads(1)
    rollout = RolloutConfig(max_num_seqs=32, dtype=DType.bfloat16)
    folder = tmp_path_factory.mktemp("hybrid")
    trained = start(folder, hf_trainer.hybrid_config(), rollout, std=0.04, probe_max_nats=0.2)
    yield trained.ready()
    trained.engine.close()


@pytest.fixture
def hybrid(hybrid_ready: Trained) -> Iterator[Trained]:
    """The hybrid engine with a fresh session; damage ends with the test."""
    hybrid_ready.renew()
    yield hybrid_ready
    hybrid_ready.heal()


@pytest.fixture
def two_workers(tmp_path: Path) -> Iterator[Trained]:
    """A dense engine of two tensor-parallel workers."""
    trained = start(tmp_path, hf_trainer.dense_config(), RolloutConfig(max_num_seqs=4, tensor_parallel=2))
    yield trained.ready()
    trained.engine.close()
