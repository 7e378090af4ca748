"""Parameters of mixture-of-experts layers: the router, the routed experts, the shared expert and its gate."""

from __future__ import annotations

from models.families_dense import LAYER, MLP
from models.mapping import FuseGateUp, Rename
from models.spec import ModelSpec, MoeSpec
from models.weight_map import Template


def moe_of(spec: ModelSpec) -> MoeSpec:
    """The expert sizes; ValueError for a dense model."""
    if spec.moe is None:
        raise ValueError(f"{spec.architecture} has no experts")
    return spec.moe


def shared_ffn_of(spec: ModelSpec) -> int:
    """The shared expert's size; ValueError for a model without one."""
    size = moe_of(spec).shared_ffn_size
    if size is None:
        raise ValueError(f"{spec.architecture} has no shared expert")
    return size


def _shared(spec: ModelSpec, layer: int) -> bool:
    return spec.moe is not None and spec.moe.shared_ffn_size is not None and spec.has_experts(layer)


EXPERTS = (
    Template(
        LAYER + "mlp.router.weight",
        (MLP + "gate.weight",),
        lambda s: Rename((moe_of(s).num_experts, s.hidden_size)),
        applies=ModelSpec.has_experts,
        own_dtype=True,
    ),
    Template(
        LAYER + "mlp.experts.{expert}.linear_fc1.weight",
        (MLP + "experts.{expert}.gate_proj.weight", MLP + "experts.{expert}.up_proj.weight"),
        lambda s: FuseGateUp(moe_of(s).ffn_size, s.hidden_size),
        applies=ModelSpec.has_experts,
        per_expert=True,
    ),
    Template(
        LAYER + "mlp.experts.{expert}.linear_fc2.weight",
        (MLP + "experts.{expert}.down_proj.weight",),
        lambda s: Rename((s.hidden_size, moe_of(s).ffn_size), 1),
        applies=ModelSpec.has_experts,
        per_expert=True,
    ),
)
SHARED_EXPERT = (
    Template(
        LAYER + "mlp.shared_experts.linear_fc1.weight",
        (MLP + "shared_expert.gate_proj.weight", MLP + "shared_expert.up_proj.weight"),
        lambda s: FuseGateUp(shared_ffn_of(s), s.hidden_size),
        applies=_shared,
    ),
    Template(
        LAYER + "mlp.shared_experts.linear_fc2.weight",
        (MLP + "shared_expert.down_proj.weight",),
        lambda s: Rename((s.hidden_size, shared_ffn_of(s)), 1),
        applies=_shared,
    ),
    Template(
        LAYER + "mlp.shared_experts.gate_weight",
        (MLP + "shared_expert_gate.weight",),
        lambda s: Rename((1, s.hidden_size)),
        applies=_shared,
    ),
)
