"""Megatron's DistributedDataParallel and distributed optimizer, with plain numbers in and out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.utils import get_model_config

from parallel.groups import ProcessGroups

KINDS = ("adam", "sgd")


@dataclass(frozen=True)
class OptimizerSettings:
    """kind: adam (decoupled weight decay, of matrices only) or sgd (no momentum). clip_grad 0 switches clipping off."""

    kind: str = "adam"
    lr: float = 1e-6
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    cpu_offload: bool = False


class StepResult(NamedTuple):
    """One optimizer step. ok False: the gradient was not finite and no parameter was changed.

    grad_norm: L2 norm of the whole model's gradient before clipping, the same on every rank. num_zeros: None unless counted.
    """

    ok: bool
    grad_norm: float
    num_zeros: int | None


def _is_expert(name: str) -> bool:
    # Shared experts ("shared_experts") are dense layers.
    return ".experts." in f".{name}"


def _mark_experts(chunk: torch.nn.Module, groups: ProcessGroups) -> None:
    """Route expert gradients to the expert-data-parallel group wherever it is another group than the dense one.

    Megatron does so only when ep > 1: with tp=2, ep=1, etp=1 each rank holds whole experts that saw half the tokens, and
    their gradients would never be added up.
    """
    if groups.edp.size() == groups.dp_cp.size():
        return
    for name, parameter in chunk.named_parameters():
        if _is_expert(name):
            setattr(parameter, "allreduce", False)  # noqa: B010  (Megatron's mark on a tensor)


def build_ddp(
    chunks: Sequence[torch.nn.Module], groups: ProcessGroups, *, distributed_optimizer: bool = True
) -> list[DistributedDataParallel]:
    """Wrap each model chunk; gradients are accumulated and reduced in fp32 in `main_grad`."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=distributed_optimizer
    )
    wrapped = []
    for index, chunk in enumerate(chunks):
        _mark_experts(chunk, groups)
        wrapped.append(DistributedDataParallel(get_model_config(chunk), settings, chunk, disable_bucketing=index > 0))
    return wrapped


def _megatron_config(settings: OptimizerSettings, chunk: DistributedDataParallel) -> OptimizerConfig:
    model_dtype = get_model_config(chunk).params_dtype
    return OptimizerConfig(
        optimizer=settings.kind,
        lr=settings.lr,
        min_lr=0.0,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        sgd_momentum=0.0,
        clip_grad=settings.clip_grad,
        params_dtype=model_dtype,
        bf16=model_dtype == torch.bfloat16,
        use_distributed_optimizer=chunk.ddp_config.use_distributed_optimizer,
        optimizer_cpu_offload=settings.cpu_offload,
        optimizer_offload_fraction=1.0 if settings.cpu_offload else 0.0,
    )


def _base_optimizers(optimizer: Any) -> list[Any]:
    return [part.optimizer for part in optimizer.chained_optimizers if part.optimizer is not None]


class TrainerOptimizer:
    """Gradients to zero, one step, one learning rate; what Megatron's optimizer is underneath stays here."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
        """Use `build_optimizer`."""
        self._chunks = list(chunks)
        self.megatron = optimizer

    @property
    def implementation(self) -> str:
        """The class that really does the update, such as `torch.optim.adamw.AdamW`."""
        kinds = {f"{type(base).__module__}.{type(base).__qualname__}" for base in _base_optimizers(self.megatron)}
        return ", ".join(sorted(kinds)) or "none"

    def zero_grad(self) -> None:
        """Before each batch."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.megatron.zero_grad()

    def set_lr(self, lr: float) -> None:
        """Learning rate of every parameter from the next step on."""
        for group in self.megatron.param_groups:
            group["lr"] = lr

    def step(self) -> StepResult:
        """Clip and update. A gradient that is not finite changes nothing and is reported. Collective."""
        if self.megatron.prepare_grads():
            return StepResult(False, math.nan, None)
        grad_norm = float(self.megatron.get_grad_norm())
        if not math.isfinite(grad_norm):
            return StepResult(False, grad_norm, None)
        ok, _, num_zeros = self.megatron.step()
        return StepResult(bool(ok), grad_norm, num_zeros)


def build_optimizer(chunks: Sequence[DistributedDataParallel], settings: OptimizerSettings) -> TrainerOptimizer:
    """The optimizer of this rank's chunks; TransformerEngine's or Apex' fused one where installed, else torch's.

    ValueError: unknown kind, sgd with the distributed optimizer, or cpu_offload where the model is on the CPU already.
    """
    if settings.kind not in KINDS:
        raise ValueError(f"optimizer {settings.kind!r} must be one of {', '.join(KINDS)}")
    if settings.kind == "sgd" and chunks[0].ddp_config.use_distributed_optimizer:
        raise ValueError("Megatron's distributed optimizer takes adam only: build_ddp(..., distributed_optimizer=False) for sgd")
    device = next(chunks[0].parameters()).device
    if settings.cpu_offload and device.type == "cpu":
        raise ValueError("optimizer.cpu_offload=True needs a model on a GPU; this one is on the CPU")
    config = _megatron_config(settings, chunks[0])
    exceptions = get_standard_config_overrides(config)
    optimizer = get_megatron_optimizer(config, list(chunks), exceptions, use_gloo_process_groups=False)
    for group in optimizer.param_groups:
        # Megatron leaves this to its scheduler, which we do not use: vectors (norms, biases, decay rates) do not decay.
        group["weight_decay"] = settings.weight_decay * group["wd_mult"]
    return TrainerOptimizer(chunks, optimizer)
