"""How Megatron's distributed checkpoints store a model: the key, the global shape and the place of every parameter.

Made from the weight map alone, for any parallel layout and both supported Megatron-Core versions; tests compare it with
the `sharded_state_dict` of the modules themselves. Layers that are all alike are stacked: one tensor per kind of
parameter, with the layer as its first axis. Mixed models keep the layer's number in the key. Experts always have an axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from models.delta_net_mapping import DeltaNetConv, FuseDeltaNetFlat, FuseDeltaNetGrouped
from models.mapping import FuseGateUp, Op, Rename, Shape, VocabRows
from models.spec import ModelSpec
from models.weight_map import Rule

PROJECTION_SECTIONS = ("query", "key", "value", "z", "beta", "alpha")
CONV_SECTIONS = ("query", "key", "value")
_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Section:
    """Rows of a parameter that are stored together.

    key: of the stored tensor, whose shape is `lead` (index, size) axes and then `shape`. The section is `shape`, or with
    `of` = 2 one of two equal parts of dimension 0 (gate, up), which tensor parallelism cuts one by one.
    rows: where it lies in dimension 0 of the whole parameter. axis: what tensor parallelism cuts, None for nothing.
    """

    key: str
    lead: tuple[tuple[int, int], ...]
    shape: Shape
    rows: tuple[int, int]
    axis: int | None
    part: int = 0
    of: int = 1

    @property
    def global_shape(self) -> Shape:
        """Shape of the stored tensor."""
        return (*(size for _, size in self.lead), self.shape[0] * self.of, *self.shape[1:])

    @property
    def offset(self) -> Shape:
        """Where the section begins in the stored tensor."""
        return (*(index for index, _ in self.lead), self.shape[0] * self.part, *(0 for _ in self.shape[1:]))


def layers_alike(spec: ModelSpec) -> bool:
    """True when every decoder layer has the same parameters, so that Megatron stacks them."""
    return not spec.dense_layers and not spec.linear_layers


def _key(rule: Rule, spec: ModelSpec, stacked: bool) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The stored tensor's key and its leading axes."""
    key, lead = rule.megatron, []
    if rule.layer is not None:
        if key.endswith(".input_layernorm.weight"):
            mixer = "in_proj" if spec.is_linear(rule.layer) else "linear_qkv"
            key = key.replace("input_layernorm.weight", f"self_attention.{mixer}.layer_norm_weight")
        elif key.endswith(".pre_mlp_layernorm.weight") and not spec.has_experts(rule.layer):
            key = key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        if stacked:
            key = _LAYER.sub("decoder.layers.", key)
            lead.append((rule.layer, spec.num_layers))
    if rule.expert is not None and spec.moe is not None:
        key = _EXPERT.sub(".mlp.experts.experts.", key)
        lead.append((rule.expert, spec.moe.num_experts))
    return key, tuple(lead)


def whole_shape(op: Op) -> Shape:
    """Shape of the Megatron parameter on one rank, vocabulary padding left out: all ops put rows below each other."""
    rows = sum(shape[0] for shape in op.shapes)
    return (rows, *op.shapes[0][1:])


def sections_of(rule: Rule, spec: ModelSpec, *, stacked: bool, tp: int = 1) -> tuple[Section, ...]:
    """The stored sections of a parameter, in the order of its rows. A vocabulary is padded for `tp` tensor-parallel ranks.

    stacked: see `layers_alike`, which says how Megatron writes a model; a checkpoint of somebody else's may differ.
    """
    key, lead = _key(rule, spec, stacked)
    shape, op = whole_shape(rule.op), rule.op
    if isinstance(op, FuseGateUp):
        half = (shape[0] // 2, *shape[1:])
        return tuple(Section(key, lead, half, (n * half[0], (n + 1) * half[0]), 0, n, 2) for n in range(2))
    if isinstance(op, FuseDeltaNetFlat | FuseDeltaNetGrouped):
        return tuple(_named(key, lead, shape, PROJECTION_SECTIONS, op.delta_net.projection_sections))
    if isinstance(op, DeltaNetConv):
        return tuple(_named(key, lead, shape, CONV_SECTIONS, op.delta_net.conv_sections))
    if isinstance(op, VocabRows):
        shape = (spec.padded_vocab(tp), *shape[1:])
    axis = op.shard_dim if isinstance(op, Rename) else (0 if op.sharded else None)
    return (Section(key, lead, shape, (0, shape[0]), axis),)


def _named(
    key: str, lead: tuple[tuple[int, int], ...], shape: Shape, names: tuple[str, ...], rows: tuple[int, ...]
) -> Iterator[Section]:
    start = 0
    for name, count in zip(names, rows, strict=True):
        yield Section(f"{key}.{name}", lead, (count, *shape[1:]), (start, start + count), 0)
        start += count


def extra_state_keys(rules: Iterable[Rule], spec: ModelSpec) -> Iterator[str]:
    """Names of the (empty) objects that Megatron's and TransformerEngine's modules look for beside their weights."""
    seen: set[str] = set()
    for rule in rules:
        module, _, parameter = rule.megatron.rpartition(".")
        modules = [module] if parameter == "weight" and rule.exported else []
        if module.endswith("self_attention.linear_qkv"):
            modules.append(module.removesuffix("linear_qkv") + "core_attention")
        for name in modules:
            key, lead = _module_key(name, rule, spec)
            offset, shape = (".".join(str(n) for n in axis) for axis in zip(*(lead or ((0, 1),)), strict=True))
            full = f"{key}._extra_state/shard_{offset}_{shape}"
            if full not in seen:
                seen.add(full)
                yield full


def _module_key(module: str, rule: Rule, spec: ModelSpec) -> tuple[str, tuple[tuple[int, int], ...]]:
    _, lead = _key(rule, spec, layers_alike(spec))
    if rule.layer is not None and layers_alike(spec):
        module = _LAYER.sub("decoder.layers.", module + ".").removesuffix(".")
    return _EXPERT.sub(".mlp.experts.experts.", module + ".").removesuffix("."), lead
