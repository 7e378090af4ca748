"""RolloutConfig -> vLLM's engine arguments and environment, the same for an owned engine and a server of ours.

No vLLM import: plain dicts, checked by vLLM itself when the engine starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcore_rl.config.schema import RolloutConfig

WORKER_EXTENSION = "mcore_rl.rollout.vllm_worker.WorkerExtension"
BACKEND = "mcore_shm"
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
_RANK_PREFIXES = ("MASTER_", "TORCHELASTIC_", "ROLE_", "NCCL_ASYNC")


def engine_arguments(
    config: RolloutConfig, model: str, *, device: str, extension: str = WORKER_EXTENSION, routes: bool = False
) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM. device: `cpu` or `cuda`.

    routes: the experts of every token are wanted; only a GPU's engine has an argument for it.
    generation_config="vllm": a model's own generation defaults never apply. Log-probs are of the untouched logits.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "skip_tokenizer_init": True,
        "dtype": config.dtype.value,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
        "worker_extension_cls": extension,
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.sleep_level:
        arguments["enable_sleep_mode"] = True
    if device == "cuda":
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
        if routes:
            arguments["enable_return_routed_experts"] = True
    return arguments


def engine_environment(config: RolloutConfig, *, device: str, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of an engine process: no trace of the trainer's ranks, bounded threads and memory, no network."""
    env = {name: value for name, value in (os.environ if base is None else base).items() if not _is_rank_variable(name)}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env |= {
        "OMP_NUM_THREADS": str(config.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # never pickles on vLLM's own wires, whatever the environment says
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.tensor_parallel == 1 else "1",
    }
    if device == "cpu":
        env |= {
            "TORCHDYNAMO_DISABLE": "1",
            "THP_MEM_ALLOC_ENABLE": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if config.tensor_parallel == 1 else _one_core_each(config.tensor_parallel),
        }
    return env


def _is_rank_variable(name: str) -> bool:
    return name in _RANK_VARIABLES or name.startswith(_RANK_PREFIXES)


def _one_core_each(count: int) -> str:
    cores = sorted(os.sched_getaffinity(0))
    return "|".join(str(cores[rank % len(cores)]) for rank in range(count))
