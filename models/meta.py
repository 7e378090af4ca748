"""One rank's modules on the meta device, without its process group or its memory: to check a big layout on a small machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.build import BuildOptions, build_model
from models.mapping import VocabRows
from models.ownership import in_first_replica, lives_on, shard_of
from models.parameters import canonical_parameters
from models.registry import weight_map
from models.spec import ModelSpec
from models.weight_map import Rule
from parallel import cpu_megatron
from parallel.groups import ProcessGroups, destroy_groups, initialize_groups
from parallel.layout import ParallelLayout


@contextmanager
def pretend_rank(layout: ParallelLayout, rank: int) -> Iterator[ProcessGroups]:
    """Megatron's groups as `rank` of the layout would see them, over torch's fake backend. Patches this process for the CPU.

    RuntimeError when the process has a default process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("pretend_rank: this process is a real rank already")
    cpu_megatron.install()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        yield initialize_groups(layout, seed=0)
    finally:
        destroy_groups()
        dist.destroy_process_group()


def build_on_meta(spec: ModelSpec, layout: ParallelLayout, rank: int) -> dict[str, torch.Size]:
    """Canonical name -> shape of every parameter that rank `rank` would hold."""
    with pretend_rank(layout, rank) as groups, torch.device("meta"):
        chunks = build_model(spec, groups, BuildOptions(dtype=torch.bfloat16, impl="local"))
        return {name: parameter.shape for name, parameter in canonical_parameters(chunks, spec, layout, rank).items()}


@dataclass(frozen=True)
class Coverage:
    """elements: parameters of the whole model, each found exactly once; per_rank: how many each built rank holds."""

    elements: int
    per_rank: tuple[int, ...]


def check_coverage(spec: ModelSpec, layout: ParallelLayout) -> Coverage:
    """Build every rank on the meta device and compare with the weight map.

    Every rank must hold exactly the parameters that the map places on it, and the first replica of each parameter must
    be whole and there once; RuntimeError naming the rank or the parameter otherwise.
    """
    rules = weight_map(spec)
    found: Counter[str] = Counter()
    per_rank: list[int] = []
    for rank in range(layout.world):
        shapes = build_on_meta(spec, layout, rank)
        here = [rule for rule in rules if lives_on(rule, spec, layout, rank)]
        _check_names(rank, shapes.keys(), [rule.megatron for rule in here])
        per_rank.append(sum(shape.numel() for shape in shapes.values()))
        found.update({r.megatron: shapes[r.megatron].numel() for r in here if in_first_replica(r, spec, layout, rank)})
    for rule in rules:
        if found[rule.megatron] != _stored_elements(rule, spec, layout):
            raise RuntimeError(f"{rule.megatron}: the ranks hold {found[rule.megatron]} elements of {_elements(rule)}")
    return Coverage(sum(_elements(rule) for rule in rules if rule.exported), tuple(per_rank))


def check_stages(spec: ModelSpec, layout: ParallelLayout) -> Coverage:
    """As `check_coverage`, with one rank built per pipeline stage: for layouts of many ranks.

    Ranks that differ in their tensor, expert or data coordinate alone hold the same shapes, so the first of each stage
    stands for them: its shard times the number of shards must be the whole, and its experts stand for all of them.
    """
    rules, per_stage, elements = weight_map(spec), [], 0
    for stage in range(layout.pp):
        rank = layout.world // layout.pp * stage
        shapes = build_on_meta(spec, layout, rank)
        here = [rule for rule in rules if lives_on(rule, spec, layout, rank)]
        _check_names(rank, shapes.keys(), [rule.megatron for rule in here])
        for rule in here:
            shards = shard_of(rule, layout, rank)[1] if rule.op.sharded else 1
            if shapes[rule.megatron].numel() * shards != _stored_elements(rule, spec, layout):
                raise RuntimeError(f"{rule.megatron}: {shards} shards of {tuple(shapes[rule.megatron])} are not {rule.op.shapes}")
            elements += _elements(rule) * (1 if rule.expert is None else layout.ep) if rule.exported else 0
        per_stage.append(sum(shape.numel() for shape in shapes.values()))
    return Coverage(elements, tuple(per_stage))


def _check_names(rank: int, built: Iterable[str], placed: Iterable[str]) -> None:
    different = sorted(set(built) ^ set(placed))
    if different:
        raise RuntimeError(f"rank {rank}: the built modules and the weight map disagree about {different[0]}")


def _elements(rule: Rule) -> int:
    return sum(math.prod(tensor.shape) for tensor in rule.tensors)


def _stored_elements(rule: Rule, spec: ModelSpec, layout: ParallelLayout) -> int:
    """Elements of all shards together: what the tensors have, plus the padding rows of a vocabulary."""
    if isinstance(rule.op, VocabRows):
        return spec.padded_vocab(layout.tp) * rule.op.hidden_size
    return _elements(rule)
