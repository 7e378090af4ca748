"""The one place that lets Megatron-Core run without CUDA.

`install()` changes torch and Megatron-Core for the whole process, so it is never done on import and never in a process
that hosts a rollout engine: only `parallel.runtime` calls it, in trainer ranks, when their device is the CPU.
Every change is one row of PATCHES, and every row has a test that fails without it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parallel import cpu_collectives, cpu_cuda_twins, mcore_versions

_MARK = "_mcore_rl_cpu_megatron"


def patch_tracker_state() -> None:
    """Megatron's own accessors of the CUDA generator state use the CPU generator."""
    import megatron.core.tensor_parallel.random as mcore_random  # noqa: PLC0415

    module: Any = mcore_random
    module._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def _not_the_shared_generator(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


def patch_tracker_warning() -> None:
    """Drop one warning that is always true here: forking the "GPU" generator changes the CPU generator, as they are one."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_not_the_shared_generator)


def patch_torch_norm() -> None:
    """The torch norm of the local layer spec refuses sequence parallelism; ours marks its parameters instead.

    The mark makes `finalize_model_grads` sum their gradients over the tensor-parallel ranks, each of which saw a part of
    the tokens. Everything else that Megatron's wrapper refuses is still refused.
    """
    from megatron.core.transformer import torch_norm  # noqa: PLC0415

    wrapper: Any = torch_norm.WrappedTorchNorm
    original = wrapper.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapper.__new__ = new


def patch_router_gemm() -> None:
    """The router multiplies with torch where 0.16 looks up a TransformerEngine function it did not import."""
    from megatron.core.transformer.moe import moe_utils  # noqa: PLC0415

    if mcore_versions.router_gemm_undefined(moe_utils):
        setattr(moe_utils, "te_general_gemm", None)  # noqa: B010


@dataclass(frozen=True)
class Patch:
    """One change of torch or Megatron-Core: what, why, and the function that makes it."""

    name: str
    why: str
    apply: Callable[[], None]


PATCHES = (
    Patch("streams", "torch.cuda.Stream, Event, current_stream, synchronize raise without CUDA", cpu_cuda_twins.patch_streams),
    Patch("current_device", "its result is the device of most buffers", cpu_cuda_twins.patch_current_device),
    Patch("cuda_seeding", "the rng tracker seeds and saves the CUDA generator", cpu_cuda_twins.patch_cuda_seeding),
    Patch("moves", ".cuda() raises without CUDA", cpu_cuda_twins.patch_moves),
    Patch("tensor_type", "the optimizer accepts torch.cuda.FloatTensor only", cpu_cuda_twins.patch_tensor_type),
    Patch("factories", "device='cuda' is a literal in schedules and optimizer", cpu_cuda_twins.patch_factories),
    Patch("tensor_to", ".to('cuda') is a literal", cpu_cuda_twins.patch_tensor_to),
    Patch("compile", "fusions are torch.compile'd, which needs a compiler", cpu_cuda_twins.patch_compile),
    Patch("all_to_all", "gloo wants lists of split sizes", cpu_collectives.patch_all_to_all),
    Patch("all_gather", "gloo needs equal sizes", cpu_collectives.patch_all_gather),
    Patch("tracker_state", "the rng tracker reads and writes the CUDA generator", patch_tracker_state),
    Patch("tracker_warning", "one generator instead of two", patch_tracker_warning),
    Patch("torch_norm", "the torch norm refuses sequence parallelism", patch_torch_norm),
    Patch("router_gemm", "0.16 leaves te_general_gemm undefined", patch_router_gemm),
)


def installed() -> bool:
    """True once this process runs with the patches."""
    return _MARK in vars(torch)


def install() -> None:
    """Apply every patch, once per process.

    RuntimeError: an unsupported Megatron-Core version, or a machine with CUDA (the patches would hide it).
    """
    if installed():
        return
    mcore_versions.megatron_version()
    if torch.cuda.is_available():
        raise RuntimeError("cpu_megatron: this process sees a CUDA device; hide it (CUDA_VISIBLE_DEVICES=) to train on the CPU")
    for patch in PATCHES:
        patch.apply()
    setattr(torch, _MARK, True)
