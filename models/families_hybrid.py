"""Parameters of GatedDeltaNet layers, in both Hugging Face spellings of the input projection."""

from __future__ import annotations

from models.delta_net_mapping import DeltaNetConv, FuseDeltaNetFlat, FuseDeltaNetGrouped, HeadVector
from models.families_dense import HF_LAYER, LAYER
from models.mapping import Rename
from models.spec import DeltaNetSpec, ModelSpec
from models.weight_map import Template

DELTA_NET = HF_LAYER + "linear_attn."


def delta_net_of(spec: ModelSpec) -> DeltaNetSpec:
    """The GatedDeltaNet sizes; ValueError for a model without such layers."""
    if spec.delta_net is None:
        raise ValueError(f"{spec.architecture} has no GatedDeltaNet layers")
    return spec.delta_net


GROUPED_INPUT = Template(
    LAYER + "self_attention.in_proj.weight",
    (DELTA_NET + "in_proj_qkvz.weight", DELTA_NET + "in_proj_ba.weight"),
    lambda s: FuseDeltaNetGrouped(delta_net_of(s), s.hidden_size),
    applies=ModelSpec.is_linear,
)
FLAT_INPUT = Template(
    LAYER + "self_attention.in_proj.weight",
    tuple(DELTA_NET + f"in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
    lambda s: FuseDeltaNetFlat(delta_net_of(s), s.hidden_size),
    applies=ModelSpec.is_linear,
)
DELTA_NET_LAYER = (
    Template(
        LAYER + "self_attention.conv1d.weight",
        (DELTA_NET + "conv1d.weight",),
        lambda s: DeltaNetConv(delta_net_of(s)),
        applies=ModelSpec.is_linear,
    ),
    Template(
        LAYER + "self_attention.A_log",
        (DELTA_NET + "A_log",),
        lambda s: HeadVector(delta_net_of(s)),
        applies=ModelSpec.is_linear,
        float32=True,
    ),
    Template(
        LAYER + "self_attention.dt_bias",
        (DELTA_NET + "dt_bias",),
        lambda s: HeadVector(delta_net_of(s)),
        applies=ModelSpec.is_linear,
        float32=True,
    ),
    Template(
        LAYER + "self_attention.out_norm.weight",
        (DELTA_NET + "norm.weight",),
        lambda s: Rename((delta_net_of(s).v_head_dim,)),
        applies=ModelSpec.is_linear,
    ),
    Template(
        LAYER + "self_attention.out_proj.weight",
        (DELTA_NET + "out_proj.weight",),
        lambda s: Rename((s.hidden_size, delta_net_of(s).value_size), 1),
        applies=ModelSpec.is_linear,
    ),
)
