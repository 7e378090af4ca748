"""Megatron's process groups for one layout, as a value: nobody else reads Megatron's global parallel state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup

from parallel.layout import Coordinates, ParallelLayout


@dataclass(frozen=True)
class ProcessGroups:
    """This rank's groups. `at` says where it stands in each; `megatron` is the same set for Megatron's `pg_collection`.

    dp leaves context parallel out, dp_cp keeps it in; etp, ep, edp, tp_ep arrange the experts; model_parallel is
    tp x pp; embedding holds the pipeline ranks that share a tied embedding (None on a rank that is not one of them).
    """

    layout: ParallelLayout
    at: Coordinates
    tp: ProcessGroup
    pp: ProcessGroup
    cp: ProcessGroup
    dp: ProcessGroup
    dp_cp: ProcessGroup
    ep: ProcessGroup
    etp: ProcessGroup
    edp: ProcessGroup
    tp_ep: ProcessGroup
    model_parallel: ProcessGroup
    embedding: ProcessGroup | None
    megatron: ProcessGroupCollection

    @property
    def first_stage(self) -> bool:
        """True on the first pipeline rank (embedding)."""
        return self.at.pp == 0

    @property
    def last_stage(self) -> bool:
        """True on the last pipeline rank (output layer, loss)."""
        return self.at.pp == self.layout.pp - 1


def _initialize_megatron(layout: ParallelLayout) -> None:
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        order="tp-cp-ep-dp-pp",
        # The extra gloo groups are for checkpoints of nccl runs; ours are gloo already, or go through tensors.
        create_gloo_process_groups=False,
    )


def seed_ranks(seed: int) -> None:
    """Seed torch and Megatron's rng tracker: the same on data-parallel ranks, different on tensor- and expert-parallel ones."""
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def initialize_groups(layout: ParallelLayout, seed: int) -> ProcessGroups:
    """Create Megatron's groups over the default process group and seed this rank.

    ValueError when the default process group is not as large as the layout. Collective.
    """
    if dist.get_world_size() != layout.world:
        raise ValueError(f"layout.world={layout.world}, but {dist.get_world_size()} ranks were started")
    if parallel_state.model_parallel_is_initialized():
        raise RuntimeError("initialize_groups: Megatron's groups exist already; call destroy_groups first")
    _initialize_megatron(layout)
    seed_ranks(seed)
    return _view(layout)


def _view(layout: ParallelLayout) -> ProcessGroups:
    state: Any = parallel_state
    embedding = state.get_embedding_group(check_initialized=False)
    return ProcessGroups(
        layout=layout,
        at=layout.coordinates(dist.get_rank()),
        tp=state.get_tensor_model_parallel_group(),
        pp=state.get_pipeline_model_parallel_group(),
        cp=state.get_context_parallel_group(),
        dp=state.get_data_parallel_group(),
        dp_cp=state.get_data_parallel_group(with_context_parallel=True),
        ep=state.get_expert_model_parallel_group(),
        etp=state.get_expert_tensor_parallel_group(),
        edp=state.get_expert_data_parallel_group(),
        tp_ep=state.get_expert_tensor_and_model_parallel_group(),
        model_parallel=state.get_model_parallel_group(),
        embedding=embedding if isinstance(embedding, ProcessGroup) else None,
        megatron=ProcessGroupCollection.use_mpu_process_groups(),
    )


def destroy_groups() -> None:
    """Forget Megatron's groups; the processes' default group stays (`stop_runtime` ends that one)."""
    parallel_state.destroy_model_parallel()
