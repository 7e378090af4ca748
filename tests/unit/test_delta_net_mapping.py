"""GatedDeltaNet weights with every row numbered, in both Hugging Face spellings, for every tensor-parallel size."""

import pytest
import torch

from models.delta_net_mapping import DeltaNetConv, FuseDeltaNetFlat, FuseDeltaNetGrouped, HeadVector
from models.spec import DeltaNetSpec

SPEC = DeltaNetSpec(num_k_heads=2, num_v_heads=4, k_head_dim=4, v_head_dim=6, conv_width=4)
WIDE = DeltaNetSpec(num_k_heads=4, num_v_heads=12, k_head_dim=2, v_head_dim=3, conv_width=4)
HIDDEN = 5
STARTS = {"q": 0, "k": 1000, "v": 2000, "z": 3000, "b": 4000, "a": 5000}


def rows(spec, section, heads):
    """Numbers of the rows of `heads` in a section: its start plus the row's place in the section."""
    size = {"q": spec.k_head_dim, "k": spec.k_head_dim, "v": spec.v_head_dim, "z": spec.v_head_dim, "b": 1, "a": 1}[section]
    return [STARTS[section] + head * size + row for head in heads for row in range(size)]


def matrix(numbers):
    """Row i holds numbers[i] and, after the point, the column."""
    return torch.tensor(numbers, dtype=torch.float64)[:, None] + torch.arange(HIDDEN, dtype=torch.float64) / 16


def grouped_parts(spec):
    ratio = spec.num_v_heads // spec.num_k_heads
    qkvz, ba = [], []
    for head in range(spec.num_k_heads):
        values = range(head * ratio, (head + 1) * ratio)
        qkvz += rows(spec, "q", [head]) + rows(spec, "k", [head]) + rows(spec, "v", values) + rows(spec, "z", values)
        ba += rows(spec, "b", values) + rows(spec, "a", values)
    return [matrix(qkvz), matrix(ba)]


def flat_parts(spec):
    keys, values = range(spec.num_k_heads), range(spec.num_v_heads)
    qkv = rows(spec, "q", keys) + rows(spec, "k", keys) + rows(spec, "v", values)
    return [matrix(qkv), *(matrix(rows(spec, section, values)) for section in "zba")]


def rows_of_rank(spec, rank, size):
    """q, k, v, z, b, a rows of the rank's own heads: half of the heads, never half of the matrix."""
    keys = range(spec.num_k_heads)[rank * spec.num_k_heads // size : (rank + 1) * spec.num_k_heads // size]
    values = range(spec.num_v_heads)[rank * spec.num_v_heads // size : (rank + 1) * spec.num_v_heads // size]
    return [row for section in "qkvzba" for row in rows(spec, section, keys if section in "qk" else values)]


PROJECTIONS = [(FuseDeltaNetGrouped, grouped_parts), (FuseDeltaNetFlat, flat_parts)]
SIZES = [(SPEC, 1), (SPEC, 2), (WIDE, 1), (WIDE, 2), (WIDE, 4)]


@pytest.mark.parametrize(("spec", "size"), SIZES, ids=str)
@pytest.mark.parametrize(("kind", "make"), PROJECTIONS)
def test_a_rank_holds_its_heads_rows(kind, make, spec, size):
    whole = kind(spec, HIDDEN).fuse(make(spec))
    for rank in range(size):
        assert torch.equal(kind(spec, HIDDEN).shard(whole, rank, size), matrix(rows_of_rank(spec, rank, size)))


@pytest.mark.parametrize(("spec", "size"), SIZES, ids=str)
@pytest.mark.parametrize(("kind", "make"), PROJECTIONS)
def test_export_is_import_reversed(kind, make, spec, size):
    op, parts = kind(spec, HIDDEN), make(spec)
    assert [tuple(part.shape) for part in parts] == list(op.shapes)
    whole = op.fuse(parts)
    back = op.split(op.join([op.shard(whole, rank, size) for rank in range(size)]))
    assert len(back) == len(parts)
    for got, want in zip(back, parts, strict=True):
        assert torch.equal(got, want)
        assert got.is_contiguous()


def test_both_spellings_are_one_matrix():
    assert torch.equal(
        FuseDeltaNetGrouped(WIDE, HIDDEN).fuse(grouped_parts(WIDE)), FuseDeltaNetFlat(WIDE, HIDDEN).fuse(flat_parts(WIDE))
    )


def test_conv_channels_of_a_rank():
    """4 q, 4 k and 8 v channels: the first of two ranks holds two, two and four of them."""
    op = DeltaNetConv(DeltaNetSpec(num_k_heads=2, num_v_heads=4, k_head_dim=2, v_head_dim=2))
    weight = torch.arange(16.0)[:, None, None].expand(16, 1, 4)
    shards = [op.shard(op.fuse([weight]), rank, 2) for rank in range(2)]
    assert shards[0][:, 0, 0].tolist() == [0, 1, 4, 5, 8, 9, 10, 11]
    assert shards[1][:, 0, 0].tolist() == [2, 3, 6, 7, 12, 13, 14, 15]
    (back,) = op.split(op.join(shards))
    assert back.shape == (16, 1, 4)
    assert torch.equal(back, weight)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_head_vectors(size):
    op, values = HeadVector(WIDE), torch.arange(12.0)
    shards = [op.shard(op.fuse([values]), rank, size) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert shard.tolist() == list(range(12 // size * rank, 12 // size * (rank + 1)))
    assert torch.equal(op.split(op.join(shards))[0], values)


@pytest.mark.parametrize(
    "op", [FuseDeltaNetGrouped(SPEC, HIDDEN), FuseDeltaNetFlat(SPEC, HIDDEN), DeltaNetConv(SPEC), HeadVector(SPEC)]
)
def test_more_ranks_than_key_heads_are_refused(op):
    """Four ranks divide the four value heads and every matrix here, and still not the two key heads."""
    with pytest.raises(ValueError, match="linear_num_key_heads = 2 does not divide over 4"):
        op.shard(op.fuse([torch.zeros(shape) for shape in op.shapes]), 0, 4)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="expected shapes"):
        FuseDeltaNetFlat(SPEC, HIDDEN).fuse(grouped_parts(SPEC))
    with pytest.raises(ValueError, match="linear_num_value_heads = 3 is no multiple of linear_num_key_heads = 2"):
        DeltaNetSpec(num_k_heads=2, num_v_heads=3, k_head_dim=4, v_head_dim=4)
