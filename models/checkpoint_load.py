"""A Megatron distributed checkpoint into this rank's modules, through Megatron's own loader, and out through its saver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from torch import nn

from models.parameters import unwrapped


def sharded_state(chunks: Sequence[nn.Module]) -> dict[str, Any]:
    """What Megatron's modules say they hold of the whole model, chunk by chunk."""
    return {f"model{number}": unwrapped(chunk).sharded_state_dict() for number, chunk in enumerate(chunks)}


def load_megatron_checkpoint(chunks: Sequence[nn.Module], folder: Path) -> None:
    """Fill this rank's parameters. Collective. RuntimeError naming a parameter that the checkpoint did not fill."""
    state: Any = dist_checkpointing.load(sharded_state(chunks), str(folder))
    for number, chunk in enumerate(chunks):
        model = unwrapped(chunk)
        loaded = state[f"model{number}"]
        missing, _ = model.load_state_dict(loaded, strict=False)
        lost = sorted(name for name in missing if name in dict(model.named_parameters()))
        if lost:
            raise RuntimeError(f"{folder} did not fill {lost[0]}")


def save_megatron_checkpoint(chunks: Sequence[nn.Module], folder: Path) -> None:
    """Write this model with Megatron's own saver, which starts helper processes. Collective; the folder must be new."""
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(sharded_state(chunks), str(folder))
