"""The weight map of a whole model: every Megatron parameter, the Hugging Face tensors it is made of, and where it lives.

Megatron names are canonical: layer and expert numbers are those of the whole model, and the names are those of the local
layer spec whatever implementation is built (`models.parameters` translates). Made from the spec alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

from models.mapping import Op
from models.spec import ModelSpec, TensorMeta


class Place(str, Enum):
    """Pipeline stage of a parameter: the first, the last, or the one that owns its layer."""

    FIRST = "first"
    LAST = "last"
    LAYER = "layer"


@dataclass(frozen=True)
class Template:
    """One kind of parameter. {layer} and {expert} in the names are filled in for each layer and each expert.

    own_dtype: the layer computes with it whatever the model's dtype is, so it keeps the checkpoint's.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    op: Callable[[ModelSpec], Op]
    place: Place = Place.LAYER
    per_expert: bool = False
    exported: bool = True
    own_dtype: bool = False


@dataclass(frozen=True)
class Rule:
    """One parameter. layer and expert are 0-based numbers in the whole model, None where they do not apply.

    exported is False for a second copy of a tied tensor: it is loaded, and never written.
    """

    megatron: str
    tensors: tuple[TensorMeta, ...]
    op: Op
    place: Place
    layer: int | None
    expert: int | None
    exported: bool
    own_dtype: bool


def _rule(template: Template, spec: ModelSpec, layer: int | None, expert: int | None) -> Rule:
    op = template.op(spec)
    names = [name.format(layer=layer, expert=expert) for name in template.hugging_face]
    tensors = tuple(TensorMeta(name, spec.dtype_of(name), shape) for name, shape in zip(names, op.shapes, strict=True))
    megatron = template.megatron.format(layer=layer, expert=expert)
    return Rule(megatron, tensors, op, template.place, layer, expert, template.exported, template.own_dtype)


def _expand(template: Template, spec: ModelSpec, layer: int | None) -> Iterator[Rule]:
    if not template.per_expert:
        yield _rule(template, spec, layer, None)
        return
    if spec.moe is None:
        raise ValueError(f"{spec.architecture}: {template.megatron} is per expert, but the model has no experts")
    for expert in range(spec.moe.num_experts):
        yield _rule(template, spec, layer, expert)


def expand(templates: tuple[Template, ...], spec: ModelSpec) -> tuple[Rule, ...]:
    """All rules of a model in a fixed order: first stage, layer by layer, last stage."""
    rules = [rule for t in templates if t.place is Place.FIRST for rule in _expand(t, spec, None)]
    for layer in range(spec.num_layers):
        rules += [rule for t in templates if t.place is Place.LAYER for rule in _expand(t, spec, layer)]
    return (*rules, *(rule for t in templates if t.place is Place.LAST for rule in _expand(t, spec, None)))
