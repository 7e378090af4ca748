"""The weight map of a whole model: every Megatron parameter, the Hugging Face tensors it is made of, and where it lives.

Megatron names are canonical: layer and expert numbers are those of the whole model, and the names are those of the local
layer spec whatever implementation is built (`models.parameters` translates). Made from the spec alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from models.mapping import Op
from models.spec import ModelSpec, TensorMeta


class Place(str, Enum):
    """Pipeline stage of a parameter: the first, the last, or the one that owns its layer."""

    FIRST = "first"
    LAST = "last"
    LAYER = "layer"


def _every_layer(_: ModelSpec, __: int) -> bool:
    return True


@dataclass(frozen=True)
class Template:
    """One kind of parameter. {layer}, {expert} and {text} (the spec's text_prefix) in the names are filled in.

    applies: the layers that have it. own_dtype: the layer computes with it whatever the model's dtype is, so it keeps the
    checkpoint's. float32: it is in fp32 in the trainer and in every export, whatever the model's or the checkpoint's dtype.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    op: Callable[[ModelSpec], Op]
    place: Place = Place.LAYER
    applies: Callable[[ModelSpec, int], bool] = _every_layer
    per_expert: bool = False
    exported: bool = True
    own_dtype: bool = False
    float32: bool = False


@dataclass(frozen=True)
class Rule:
    """One parameter. layer and expert are 0-based numbers in the whole model, None where they do not apply.

    exported is False for a second copy of a tied tensor: it is loaded, and never written. own_dtype, float32: see Template.
    """

    megatron: str
    tensors: tuple[TensorMeta, ...]
    op: Op
    place: Place
    layer: int | None
    expert: int | None
    exported: bool
    own_dtype: bool
    float32: bool


def _rule(template: Template, spec: ModelSpec, layer: int | None, expert: int | None) -> Rule:
    op = template.op(spec)
    names = [name.format(layer=layer, expert=expert, text=spec.text_prefix) for name in template.hugging_face]
    dtypes = [torch.float32 if template.float32 else spec.dtype_of(name) for name in names]
    tensors = tuple(TensorMeta(*part) for part in zip(names, dtypes, op.shapes, strict=True))
    return Rule(
        megatron=template.megatron.format(layer=layer, expert=expert),
        tensors=tensors,
        op=op,
        place=template.place,
        layer=layer,
        expert=expert,
        exported=template.exported,
        own_dtype=template.own_dtype,
        float32=template.float32,
    )


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
        here = [t for t in templates if t.place is Place.LAYER and t.applies(spec, layer)]
        rules += [rule for t in here for rule in _expand(t, spec, layer)]
    return (*rules, *(rule for t in templates if t.place is Place.LAST for rule in _expand(t, spec, None)))
