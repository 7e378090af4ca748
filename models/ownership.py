"""Which rank holds which parameter, from the spec and the layout alone: no Megatron, no process group."""

from __future__ import annotations

from models.spec import ModelSpec
from models.weight_map import Place, Rule
from parallel.layout import ParallelLayout


def stage_of(rule: Rule, spec: ModelSpec, layout: ParallelLayout) -> int:
    """Pipeline rank that holds the parameter."""
    if rule.place is Place.FIRST:
        return 0
    if rule.place is Place.LAST or rule.layer is None:
        return layout.pp - 1
    return layout.stage_of_layer(spec.num_layers, rule.layer)


def expert_rank_of(rule: Rule, spec: ModelSpec, layout: ParallelLayout) -> int:
    """Expert-parallel rank that holds the expert; 0 for everything else."""
    if rule.expert is None or spec.moe is None:
        return 0
    return rule.expert // (spec.moe.num_experts // layout.ep)


def holder_of(rule: Rule, spec: ModelSpec, layout: ParallelLayout) -> int:
    """The one rank that hands the parameter out: first of its data- and tensor-parallel ranks."""
    stage = stage_of(rule, spec, layout)
    if rule.expert is None:
        return layout.tp * layout.cp * layout.dp * stage
    return layout.etp * (expert_rank_of(rule, spec, layout) + layout.ep * layout.edp * stage)


def lives_on(rule: Rule, spec: ModelSpec, layout: ParallelLayout, rank: int) -> bool:
    """True when `rank` holds the parameter or a shard of it.

    A tied head has no parameter of its own where the embedding is on the same rank.
    """
    at = layout.coordinates(rank)
    if not rule.exported and layout.pp == 1:
        return False
    right_expert = rule.expert is None or at.ep == expert_rank_of(rule, spec, layout)
    return at.pp == stage_of(rule, spec, layout) and right_expert


def shard_of(rule: Rule, layout: ParallelLayout, rank: int) -> tuple[int, int]:
    """Which shard of how many `rank` holds, where it holds the parameter."""
    at = layout.coordinates(rank)
    return (at.tp, layout.tp) if rule.expert is None else (at.etp, layout.etp)


def in_gather(rule: Rule, spec: ModelSpec, layout: ParallelLayout, rank: int) -> bool:
    """True on the holder and on the ranks with the other shards of the same replica."""
    at = layout.coordinates(rank)
    first = at.edp == 0 if rule.expert is not None else at.dp == 0 and at.cp == 0
    return first and lives_on(rule, spec, layout, rank)


def in_first_replica(rule: Rule, spec: ModelSpec, layout: ParallelLayout, rank: int) -> bool:
    """True on as few ranks as hold the parameter whole: the shards of one replica, or its holder when nothing is split."""
    shard, _ = shard_of(rule, layout, rank)
    return in_gather(rule, spec, layout, rank) and (rule.op.sharded or shard == 0)
