"""Every field of a run's configuration, its type and its default.

Hydra groups under `configs/` fill these dataclasses, so an unknown key or a wrong type is an error naming the key.
Units are in the names. `None` means "off" or "derive it", never "whatever the library does".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mcore_rl.config.algorithm import Aggregation, AlgorithmConfig, Baseline, RatioLevel
from mcore_rl.config.distill import DistillConfig
from mcore_rl.config.dtype import DType
from mcore_rl.config.reward import DataGateConfig, RewardConfig
from mcore_rl.config.router import ReplaySource, RouterConfig, RouterMode

# The algorithm's and the router's fields have files of their own, and so has what several sections share.
__all__ = ["Aggregation", "AlgorithmConfig", "Baseline", "DType", "RatioLevel", "ReplaySource", "RouterConfig", "RouterMode"]


class Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Impl(str, Enum):
    """Layer implementation: `te` is TransformerEngine, `local` is ours, `auto` is te where it is installed on a GPU."""

    auto = "auto"
    te = "te"
    local = "local"


@dataclass
class BuildConfig:
    """A small random model made from transformers' own config class, when `model.path` is empty."""

    architecture: str = "Qwen3MoeForCausalLM"
    hf_config: dict[str, Any] = field(default_factory=dict)
    init_std: float = 0.02
    tokenizer: str = "arithmetic"


@dataclass
class ModelConfig:
    """path: a Hugging Face folder (config.json, safetensors, tokenizer). build: used when path is None."""

    path: str | None = None
    build: BuildConfig | None = None
    dtype: DType = DType.float32
    impl: Impl = Impl.auto
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    recompute: bool = False


@dataclass
class LayoutConfig:
    """Parallel sizes of the trainer. world = dp x tp x pp x cp; ep and etp divide what the experts are spread over.

    first_stage_layers, last_stage_layers: layers of the first and last pipeline rank, where they are not the even share.
    """

    world: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    ep: int = 1
    etp: int = 1
    cp: int = 1
    sp: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    tokens_per_micro_batch: int = 4096


class LrSchedule(str, Enum):
    constant = "constant"
    cosine = "cosine"


@dataclass
class OptimizerConfig:
    """Adam (Megatron's distributed optimizer). warmup_steps and total_steps count optimizer steps."""

    lr: float = 1e-6
    min_lr_ratio: float = 0.1
    schedule: LrSchedule = LrSchedule.constant
    warmup_steps: int = 0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    cpu_offload: bool = False


class EngineKind(str, Enum):
    vllm = "vllm"
    trainer = "trainer"


class Placement(str, Enum):
    owned = "owned"
    url = "url"


@dataclass
class RolloutConfig:
    """Where samples come from. placement=owned: the run starts `engines` engines of its own. placement=url: the servers
    in `url`, or in url_file (one address a line), which is read again before every sync.

    max_engine_restarts: deaths of engines that a run survives, all together; 0 ends it with the first.
    sleep_level: engines give GPU memory back while the trainer works: 1 keeps their weights in host memory, 2 drops them.
    """

    engine: EngineKind = EngineKind.vllm
    placement: Placement = Placement.owned
    engines: int = 1
    url: list[str] = field(default_factory=list)
    url_file: str | None = None
    dtype: DType = DType.float32
    tensor_parallel: int = 1
    expert_parallel: bool = False
    max_model_len: int = 256
    max_num_seqs: int = 256
    kv_cache_gib: int = 1
    gpu_memory_utilization: float = 0.6
    enforce_eager: bool = True
    threads: int = 1
    start_timeout_s: float = 300.0
    request_timeout_s: float = 600.0
    max_engine_restarts: int = 3
    sleep_level: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 32


class OnFailedProof(str, Enum):
    """What follows a weight sync that an engine did not prove: the run's end, or one complete sync more."""

    stop = "stop"
    resync = "resync"


@dataclass
class SyncConfig:
    """bucket_bytes bounds one bucket of the weight sync; two are staged.

    probe_sequences are scored by trainer and engine after every sync; probe_max_nats and probe_mean_nats (null: none) bound
    the largest and the mean difference. Every tensor is read back at least once in
    readback_every syncs, and all of them at the first sync. max_resyncs: re-syncs of a run, all together.
    """

    bucket_bytes: int = 64 * 1024 * 1024
    probe_sequences: int = 4
    probe_max_nats: float = 1e-3
    probe_mean_nats: float | None = None
    readback_every: int = 10
    on_failed_proof: OnFailedProof = OnFailedProof.stop
    max_resyncs: int = 2


class TaskKind(str, Enum):
    arithmetic = "arithmetic"
    countdown = "countdown"
    file = "file"


class BadRows(str, Enum):
    """refuse: the first unusable row of a file is an error. skip: it is left out and counted."""

    refuse = "refuse"
    skip = "skip"


class Overlap(str, Enum):
    """A training question that is in eval_file too: refuse is an error, drop takes it out of training and counts it."""

    refuse = "refuse"
    drop = "drop"


@dataclass
class TaskConfig:
    """terms, digits: difficulty of the procedural tasks. train_file/eval_file: GSM8K-style JSONL or parquet.

    bad_rows: what an unusable row of a file does; questions given twice count once, with two answers they are unusable.
    band_file: train on the prompts of this file alone, written by `mcore-rl probe` (band.jsonl); band_any_model lifts
    the refusal of a band that was probed with other starting weights.
    """

    kind: TaskKind = TaskKind.arithmetic
    min_terms: int = 6
    max_terms: int = 6
    worked_share: float = 0.35
    worked_only_steps: int = 200
    numbers: int = 3
    max_number: int = 20
    train_file: str | None = None
    eval_file: str | None = None
    bad_rows: BadRows = BadRows.refuse
    overlap: Overlap = Overlap.refuse
    band_file: str | None = None
    band_any_model: bool = False
    system_prompt: str | None = None
    prompt_suffix: str = ""
    answer_pattern: str = "boxed"
    require_full_format: bool = True


@dataclass
class SftConfig:
    """Supervised warm-up. steps 0 skips it. It stops once greedy validation accuracy and format pass the gate."""

    steps: int = 0
    batch_size: int = 64
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    aux_loss_coef: float = 0.0
    first_check_step: int = 200
    check_every: int = 20
    check_prompts: int = 200
    min_accuracy: float = 0.15
    max_accuracy: float = 0.60
    min_format: float = 0.97


@dataclass
class TrainConfig:
    """steps counts rollout batches; each is cut into updates_per_batch optimizer updates of whole groups."""

    steps: int = 1
    prompts_per_step: int = 32
    samples_per_prompt: int = 8
    updates_per_batch: int = 1
    shuffle_rewards: bool = False


@dataclass
class EvalConfig:
    """Held-out evaluation before and after, same prompts, greedy and at temperature 1.

    export_check_prompts: that many greedy answers of the engine must be what transformers chooses with the exported checkpoint.
    """

    prompts: int = 500
    temperature_1: bool = True
    bootstrap_samples: int = 10_000
    export_check_prompts: int = 8


@dataclass
class TelemetryConfig:
    """wandb: offline, online or disabled. audited_groups: groups of a training step that go to audit.jsonl."""

    wandb: str = "offline"
    wandb_project: str = "mcore_rl"
    rollouts_logged: int = 1_000_000
    audited_groups: int = 64
    progress: bool = True


@dataclass
class RunConfig:
    """A whole run."""

    name: str = "run"
    seed: int = 0
    out_dir: str = "runs"
    device: Device = Device.auto
    resume: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    router: RouterConfig = field(default_factory=RouterConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    data_gate: DataGateConfig = field(default_factory=DataGateConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
