"""Start a vLLM server that a run can sync with: `python -m mcore_rl.rollout.vllm_server --model DIR --port N`.

Nothing but the command line and environment such a server needs, so a server can just as well be started by hand.
Loopback by default; another address needs a key (MCORE_RL_ENGINE_KEY), because the routes that change weights can do
anything.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from mcore_rl.config.schema import DType, RolloutConfig
from mcore_rl.rollout.addresses import GUARD, check_address, engine_key
from mcore_rl.rollout.engine_args import engine_arguments, engine_environment
from mcore_rl.rollout.lifeline import become_root

LOOPBACK = "127.0.0.1"
_FLAGS = {
    "dtype": "--dtype",
    "tensor_parallel_size": "--tensor-parallel-size",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "generation_config": "--generation-config",
    "logprobs_mode": "--logprobs-mode",
    "worker_extension_cls": "--worker-extension-cls",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "seed": "--seed",
}


def server_command(
    config: RolloutConfig, model: str, *, port: int, host: str = LOOPBACK, device: str = "cpu", extra: Sequence[str] = ()
) -> list[str]:
    """The command line; `extra` comes last and wins."""
    arguments = engine_arguments(config, model, device=device)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", host, "--port", str(port)]
    command += ["--skip-tokenizer-init", "--tokens-only", "--disable-log-stats", "--no-enable-prefix-caching"]
    for name, flag in _FLAGS.items():
        if name in arguments:
            command += [flag, str(arguments[name])]
    command += ["--weight-transfer-config", json.dumps(arguments["weight_transfer_config"])]
    command += ["--enforce-eager"] if config.enforce_eager else []
    command += ["--enable-expert-parallel"] if config.expert_parallel else []
    command += ["--middleware", GUARD] if engine_key() else []
    return [*command, *extra]


def server_environment(config: RolloutConfig, *, device: str = "cpu") -> dict[str, str]:
    """The environment: that of an engine, with the routes for weight updates opened."""
    env = engine_environment(config, device=device)
    return env | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def main(argv: Sequence[str] | None = None) -> None:
    """Replace this process by the server. Unknown options go to vLLM as they are."""
    defaults = RolloutConfig()
    parser = argparse.ArgumentParser(prog="python -m mcore_rl.rollout.vllm_server", description=__doc__)
    parser.add_argument("--model", required=True, help="Hugging Face folder")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--host", default=LOOPBACK, help="address to listen on; anything but loopback needs a key")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=[kind.value for kind in DType], default=defaults.dtype.value)
    parser.add_argument("--tensor-parallel", type=int, default=defaults.tensor_parallel)
    parser.add_argument("--max-model-len", type=int, default=defaults.max_model_len)
    parser.add_argument("--max-num-seqs", type=int, default=defaults.max_num_seqs)
    options, extra = parser.parse_known_args(argv)
    try:
        check_address("--host", options.host)
    except ValueError as refusal:
        parser.error(str(refusal))
    config = RolloutConfig(
        dtype=DType(options.dtype),
        tensor_parallel=options.tensor_parallel,
        max_model_len=options.max_model_len,
        max_num_seqs=options.max_num_seqs,
    )
    command = server_command(config, options.model, port=options.port, host=options.host, device=options.device, extra=extra)
    become_root()  # the server keeps this process' id
    os.execve(command[0], command, server_environment(config, device=options.device))


if __name__ == "__main__":
    main()
