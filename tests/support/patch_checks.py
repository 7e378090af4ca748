"""For every row of `cpu_megatron.PATCHES`, a check that passes with the patch and fails without it.

Run as a program it prints JSON: {"results": {patch: {"with": ..., "without": ...}}, "spared": [...]}; null is a passed check.
Each check runs in a fork of one process that has imported torch and Megatron-Core, unpatched: cheap, and nothing leaks.
"""

import json
import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from parallel import cpu_cuda_twins, cpu_megatron, mcore_versions


def require(condition, message):
    if not condition:
        raise AssertionError(message)


def streams():
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    stream.record_event(torch.cuda.Event(enable_timing=True)).wait(torch.cuda.default_stream())
    with torch.cuda.stream(stream):
        torch.cuda.synchronize()
    require(stream.query(), "work on a CPU is done when its call returns")


def current_device():
    require(torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu", "buffers must be on the CPU")


def cuda_seeding():
    torch.manual_seed(3)
    torch.cuda.manual_seed(5)
    drawn = torch.rand(2)
    torch.default_generator.manual_seed(5)
    require(torch.equal(drawn, torch.rand(2)), "torch.cuda.manual_seed must seed the generator in use")
    state = torch.cuda.get_rng_state()
    drawn = torch.rand(2)
    torch.cuda.set_rng_state(state)
    require(torch.equal(drawn, torch.rand(2)), "torch.cuda.set_rng_state must restore the generator in use")


def moves():
    require(torch.zeros(1).cuda().device.type == "cpu", "tensor.cuda()")
    require(torch.nn.Linear(1, 1).cuda().weight.device.type == "cpu", "module.cuda()")


def tensor_type():
    require(torch.zeros(1).type() == "torch.cuda.FloatTensor", "Megatron's optimizer accepts this name")
    require(torch.zeros(1).type(torch.float64).dtype == torch.float64, "a conversion stays one")


def factories():
    like = torch.zeros(2)
    arguments = {
        "as_tensor": ([1.0],),
        "empty_like": (like,),
        "full": ((2,), 1.0),
        "full_like": (like, 1.0),
        "linspace": (0, 1, 2),
        "ones_like": (like,),
        "rand_like": (like,),
        "randint": (0, 5, (2,)),
        "randn_like": (like,),
        "tensor": ([1.0],),
        "zeros_like": (like,),
    }
    for name in cpu_cuda_twins.FACTORIES:
        for device in ("cuda", "cuda:0", torch.device("cuda")):
            made = vars(torch)[name](*arguments.get(name, (2,)), device=device)
            require(made.device.type == "cpu", f"torch.{name}(device={device!r})")


def tensor_to():
    for arguments, keywords in [(("cuda",), {}), ((torch.device("cuda", 0),), {}), ((), {"device": "cuda"})]:
        require(torch.zeros(1).to(*arguments, **keywords).device.type == "cpu", f"to({arguments}, {keywords})")
    require(torch.zeros(1).to(torch.int32).dtype == torch.int32, "a conversion stays one")


def compile_():
    def backend(*_):
        raise AssertionError("torch.compile called its backend, which needs a compiler on the CPU")

    require(torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1)).item() == 1.0, "runs eagerly")


def two_ranks(body):
    """Run body(rank) in two gloo ranks, this process and a fork of it; fails when either does."""
    store = Path(tempfile.mkdtemp()) / "store"
    child = os.fork()
    rank = 1 if child == 0 else 0
    code = 1
    try:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
        body(rank)
        dist.destroy_process_group()
        code = 0
    finally:
        if child == 0:
            os._exit(code)
    require(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "rank 1 failed")


def all_to_all():
    def body(rank):
        splits = torch.tensor([1, 2]) if rank == 0 else torch.tensor([2, 1])
        sent = torch.full((3,), float(rank))
        received = torch.empty(3)
        dist.all_to_all_single(received, sent, splits, splits)
        expected = {0: [0.0, 1.0, 1.0], 1: [0.0, 0.0, 1.0]}[rank]
        require(received.tolist() == expected, f"received {received.tolist()}, expected {expected}")

    two_ranks(body)


def all_gather():
    def body(rank):
        parts = [torch.full((1, 2), -1.0), torch.full((3, 2), -1.0)]
        dist.all_gather(parts, torch.full(parts[rank].shape, float(rank)))
        require(torch.equal(torch.cat(parts), torch.tensor([[0.0] * 2] + [[1.0] * 2] * 3)), f"gathered {parts}")
        parts = [torch.zeros(0, 2), torch.zeros(2, 2)]
        dist.all_gather(parts, torch.full(parts[rank].shape, 7.0))
        require(torch.equal(parts[1], torch.full((2, 2), 7.0)), "a rank may bring nothing")

    two_ranks(body)


def tracker_state():
    torch.default_generator.manual_seed(1)
    state = mcore_random._get_cuda_rng_state()
    drawn = torch.rand(2)
    mcore_random._set_cuda_rng_state(state)
    require(torch.equal(drawn, torch.rand(2)), "Megatron restores the generator in use")


def tracker_warning():
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addHandler(handler)
    logger.warning("CPU RNG state changed within GPU RNG context")
    logger.warning("something else")
    require(seen == ["something else"], f"logged {seen}")


def norm_config(**changes):
    settings = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "normalization": "RMSNorm"}
    return TransformerConfig(**settings, persist_layer_norm=False, **changes)


def torch_norm():
    parallel = norm_config(tensor_model_parallel_size=2, sequence_parallel=True)
    require(WrappedTorchNorm(parallel, 8).weight.sequence_parallel is True, "its gradient is summed over tp")
    require(WrappedTorchNorm(norm_config(), 8).weight.sequence_parallel is False, "not without sequence parallelism")
    refused = norm_config(memory_efficient_layer_norm=True)
    try:
        WrappedTorchNorm(refused, 8)
    except AssertionError:
        return
    raise AssertionError("what else Megatron refuses stays refused")


def router_gemm():
    inputs, weight = torch.randn(3, 1, 4), torch.randn(2, 4)
    output = moe_utils.router_gating_linear(inputs, weight, None, torch.float32)
    require(torch.allclose(output, inputs @ weight.T, atol=1e-6), "router logits")


CHECKS = {
    "streams": streams,
    "current_device": current_device,
    "cuda_seeding": cuda_seeding,
    "moves": moves,
    "tensor_type": tensor_type,
    "factories": factories,
    "tensor_to": tensor_to,
    "compile": compile_,
    "all_to_all": all_to_all,
    "all_gather": all_gather,
    "tracker_state": tracker_state,
    "tracker_warning": tracker_warning,
    "torch_norm": torch_norm,
    "router_gemm": router_gemm,
}


def outcome(check, patches):
    """Apply the patches and run the check in a fork: None when it passes, else the last line of what it raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        message = ""
        try:
            for patch in patches:
                patch.apply()
            check()
        except BaseException:  # noqa: BLE001  (reported to the parent)
            message = traceback.format_exc().strip().splitlines()[-1]
        os.write(write, message.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message or None


def main():
    # Megatron-Core 0.19 does not need this one any more: there the check passes either way.
    spared = [] if mcore_versions.router_gemm_undefined(moe_utils) else ["router_gemm"]
    results = {}
    for name, check in CHECKS.items():
        others = [patch for patch in cpu_megatron.PATCHES if patch.name != name]
        results[name] = {"with": outcome(check, cpu_megatron.PATCHES), "without": outcome(check, others)}
    sys.stdout.write(json.dumps({"results": results, "spared": spared}) + "\n")


if __name__ == "__main__":
    main()
