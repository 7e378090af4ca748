"""The weight sync benchmark's CUDA path: vLLM's nccl or ipc transport under our weights. NOT RUN ON A GPU YET.

torchrun --nproc-per-node 2 tools/bench_sync_cuda.py CHECKPOINT nccl http://127.0.0.1:8000 WORKERS, against a vLLM server started
with VLLM_SERVER_DEV_MODE=1 and --weight-transfer-config '{"backend": "nccl"}'. tests/engine/test_vllm_transports.py takes it
as far as the call that would move bytes.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from mcore_rl.policy_weights import PolicyWeights
from mcore_rl.sync.vllm_source import open_sender, server_client
from models.build import BuildOptions, build_model
from models.registry import read_spec
from models.weights import ModelWeights, load_hf_weights
from parallel.groups import initialize_groups
from parallel.layout import ParallelLayout
from parallel.runtime import start_runtime

PORT = 29631
ROUNDS = 6


def median_send(send: Callable[[], None], synchronize: Callable[[], None], rounds: int) -> float:
    """Median seconds of a whole update, the first one not counted."""
    seconds: list[float] = []
    for _ in range(rounds):
        synchronize()
        started = time.perf_counter()
        send()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def main() -> None:
    """Command line."""
    checkpoint, backend, url, workers = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    runtime = start_runtime("cuda")
    groups, spec = (
        initialize_groups(ParallelLayout(world=runtime.world_size, ep=runtime.world_size), seed=0),
        read_spec(checkpoint),
    )
    chunks = build_model(spec, groups, BuildOptions(dtype=torch.bfloat16, device=runtime.device))
    load_hf_weights(chunks, spec, groups, checkpoint)
    source = PolicyWeights(ModelWeights(chunks, spec, groups), lambda: 0)
    sender = open_sender(backend, source, server_client(url), rank=runtime.rank, meeting=("127.0.0.1", PORT), workers=workers)
    seconds = median_send(sender.send_weights, torch.cuda.synchronize, ROUNDS)
    if runtime.rank == 0:
        total = sum(meta.nbytes for meta in source.metadata())
        print(f"{backend}: {seconds:.3f} s for {total / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
