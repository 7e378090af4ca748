"""Every mapping on tensors whose entries say where they came from, with asymmetric sizes."""

import pytest
import torch

from models.mapping import FuseGatedQkv, FuseGateUp, FuseQkv, Rename, VocabRows

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 6, 2, 5, 3
FFN = 10


def numbered(*shape, start=0):
    size = torch.Size(shape).numel()
    return torch.arange(start, start + size, dtype=torch.float32).reshape(shape)


def parts_of(op):
    parts, start = [], 0
    for shape in op.shapes:
        parts.append(numbered(*shape, start=start))
        start += parts[-1].numel()
    return parts


OPS = [
    Rename((4, 6)),
    Rename((4, 6), 0),
    Rename((4, 6), 1),
    FuseQkv(HEADS, KV_HEADS, HEAD_DIM, WIDTH),
    FuseQkv(HEADS, KV_HEADS, HEAD_DIM),
    FuseGatedQkv(HEADS, KV_HEADS, HEAD_DIM, WIDTH),
    FuseGateUp(FFN, WIDTH),
    VocabRows(11, WIDTH, 4),
]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_export_is_import_reversed(op, size):
    parts = parts_of(op)
    whole = op.fuse(parts)
    shards = [op.shard(whole, rank, size) for rank in range(size)]
    back = op.split(op.join(shards))
    assert len(back) == len(parts)
    for got, want in zip(back, parts, strict=True):
        assert torch.equal(got, want)
        assert got.is_contiguous()


def test_qkv_rows_are_in_megatrons_order():
    """Row h of the fused matrix, for each kv head: its three query heads, then its key head, then its value head."""
    queries = torch.arange(HEADS).repeat_interleave(HEAD_DIM).float()[:, None].expand(-1, WIDTH)
    keys = (100 + torch.arange(KV_HEADS)).repeat_interleave(HEAD_DIM).float()[:, None].expand(-1, WIDTH)
    values = (200 + torch.arange(KV_HEADS)).repeat_interleave(HEAD_DIM).float()[:, None].expand(-1, WIDTH)
    fused = FuseQkv(HEADS, KV_HEADS, HEAD_DIM, WIDTH).fuse([queries, keys, values])
    heads = fused[:, 0].reshape(-1, HEAD_DIM)
    assert heads[:, 0].tolist() == [0, 1, 2, 100, 200, 3, 4, 5, 101, 201]
    assert torch.equal(heads, heads[:, :1].expand(-1, HEAD_DIM))


def test_gated_qkv_rows_are_in_megatrons_order():
    """For each kv head: its three query heads, their three gates, its key, its value. q_proj: query, gate, query, gate ..."""
    query_and_gate = torch.stack([torch.arange(HEADS), 50 + torch.arange(HEADS)], dim=1).flatten()
    keys, values = 100 + torch.arange(KV_HEADS), 200 + torch.arange(KV_HEADS)
    parts = [t.repeat_interleave(HEAD_DIM).float()[:, None].expand(-1, WIDTH) for t in (query_and_gate, keys, values)]
    op = FuseGatedQkv(HEADS, KV_HEADS, HEAD_DIM, WIDTH)
    heads = op.fuse(parts)[:, 0].reshape(-1, HEAD_DIM)
    assert heads[:, 0].tolist() == [0, 1, 2, 50, 51, 52, 100, 200, 3, 4, 5, 53, 54, 55, 101, 201]
    assert torch.equal(heads, heads[:, :1].expand(-1, HEAD_DIM))
    second = op.shard(op.fuse(parts), 1, 2)[:, 0].reshape(-1, HEAD_DIM)
    assert second[:, 0].tolist() == [3, 4, 5, 53, 54, 55, 101, 201]


def test_a_qkv_shard_holds_whole_groups():
    op = FuseQkv(HEADS, KV_HEADS, HEAD_DIM)
    whole = op.fuse(
        [torch.arange(HEADS).repeat_interleave(HEAD_DIM), *(torch.zeros(KV_HEADS * HEAD_DIM, dtype=torch.int64),) * 2]
    )
    assert op.shard(whole, 1, 2).reshape(-1, HEAD_DIM)[:3, 0].tolist() == [3, 4, 5]


def test_gate_up_shard_is_its_gate_rows_then_its_up_rows():
    op = FuseGateUp(FFN, 1)
    whole = op.fuse([torch.arange(FFN)[:, None], 100 + torch.arange(FFN)[:, None]])
    assert op.shard(whole, 1, 2)[:, 0].tolist() == [5, 6, 7, 8, 9, 105, 106, 107, 108, 109]


def test_vocabulary_padding_is_zero_and_never_leaves():
    op = VocabRows(1003, 2, 128)
    whole = op.fuse([torch.ones(1003, 2)])
    shards = [op.shard(whole, rank, 2) for rank in range(2)]
    assert [tuple(shard.shape) for shard in shards] == [(512, 2), (512, 2)]
    assert float(shards[1][1003 - 512 :].abs().sum()) == 0.0
    assert op.join(shards).shape == (1003, 2)


def test_vocabulary_smaller_than_a_shard():
    op = VocabRows(3, 2, 4)
    shards = [op.shard(numbered(3, 2), rank, 2) for rank in range(2)]
    assert float(shards[1].abs().sum()) == 0.0
    assert torch.equal(op.join(shards), numbered(3, 2))


@pytest.mark.parametrize("op", [Rename((4, 6), 0), FuseGateUp(9, WIDTH)], ids=str)
def test_shards_that_do_not_divide_are_refused(op):
    with pytest.raises(ValueError, match="does not divide into 4 tensor-parallel shards"):
        op.shard(op.fuse(parts_of(op)), 0, 4) if isinstance(op, FuseGateUp) else op.shard(numbered(6, 4), 0, 4)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"expected shapes .* got"):
        FuseGateUp(FFN, WIDTH).fuse([torch.zeros(FFN, WIDTH), torch.zeros(FFN, WIDTH + 1)])
