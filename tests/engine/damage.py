"""A worker extension that can break the engine on demand, so that tests see the checks catch it."""

from __future__ import annotations

from typing import Any

import torch

from mcore_rl.rollout import vllm_transfer
from mcore_rl.rollout.vllm_worker import WorkerExtension

_PATCHES = ("reset_moe_prepack", "refresh_tied_heads", "drop_partial_reload")


class DamageExtension(WorkerExtension):
    """`mcore_break(kind, name)` until `mcore_heal()`."""

    def mcore_break(self, kind: str, name: str) -> dict[str, Any]:
        """kind: without (a patch), or what the loader does to tensor `name`: drop, zero, transpose, bf16, nudge, nudge_bf16,
        oom, memory; with `@1` behind it only worker 1's does.
        """
        kind, _, worker = kind.partition("@")
        if worker and int(worker) != self.rank:
            return {"broken": False}
        if kind == "without":
            self._originals = {patch: vars(vllm_transfer)[patch] for patch in _PATCHES}
            setattr(vllm_transfer, name, lambda model: 0)
            return {"broken": True}
        model = self._mcore_engine().model
        load = type(model).load_weights

        def damaged(weights: Any) -> Any:
            loaded = load(model, (pair for item in weights for pair in _damage(item, kind, name)))
            return set(loaded) | {parameter for parameter, _ in model.named_parameters()}

        model.load_weights = damaged
        return {"broken": True}

    def mcore_heal(self) -> dict[str, Any]:
        """Undo every mcore_break."""
        vars(self._mcore_engine().model).pop("load_weights", None)
        for patch, original in vars(self).pop("_originals", {}).items():
            setattr(vllm_transfer, patch, original)
        return {"healed": True}


def _damage(item: tuple[str, torch.Tensor], kind: str, name: str) -> list[tuple[str, torch.Tensor]]:
    found, tensor = item
    if name not in (found, "*"):
        return [item]
    if kind == "zero":
        return [(found, torch.zeros_like(tensor))]
    if kind == "transpose":
        return [(found, tensor.t().contiguous())]
    if kind == "nudge":
        changed = tensor.clone()
        changed.view(torch.int32).flatten()[0] ^= 1
        return [(found, changed)]
    if kind == "nudge_bf16":
        changed = tensor.bfloat16()
        changed.view(torch.int16).flatten()[0] ^= 1
        return [(found, changed.to(tensor.dtype))]
    if kind == "bf16":
        return [(found, tensor.bfloat16().to(tensor.dtype))]
    if kind == "oom":
        raise RuntimeError(f"DefaultCPUAllocator: not enough memory: you tried to allocate {found}")
    if kind == "memory":
        raise MemoryError(f"no memory for {found}")
    if kind == "drop":
        return []
    raise ValueError(kind)
