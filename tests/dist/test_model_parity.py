"""Megatron's logits are transformers' logits, for every family and layout, on packed rows of uneven sequences."""

import pytest
import torch
from model_ranks import logits_on_rank
from tiny_models import narrowest_margin, nearest_tie, reference, router_logits, sequences, transformers_logits, write_tiny

from parallel.layout import ParallelLayout

ONE = ParallelLayout()
TP2_SP = ParallelLayout(world=2, tp=2, sp=True)
TP2 = ParallelLayout(world=2, tp=2)
EP2 = ParallelLayout(world=2, ep=2)
PP2 = ParallelLayout(world=2, pp=2)
VPP2 = ParallelLayout(world=2, pp=2, vpp=2)
TP2_EP2 = ParallelLayout(world=4, tp=2, ep=2, sp=True)
CASES = [
    *(("qwen3_moe", layout) for layout in (ONE, TP2_SP, EP2, PP2, VPP2, TP2_EP2)),
    *(("qwen3", layout) for layout in (ONE, TP2_SP, TP2, PP2)),
    *(("llama_tied", layout) for layout in (ONE, TP2_SP, PP2)),
    *(("qwen2", layout) for layout in (ONE, TP2_SP, PP2)),
    *(("qwen3_moe_mixed", layout) for layout in (ONE, TP2_SP, PP2)),
    *(("qwen3_next", layout) for layout in (ONE, TP2_SP, EP2, VPP2)),
    *(("qwen3_5_moe", layout) for layout in (ONE, EP2)),
    *(("qwen3_5", layout) for layout in (ONE, TP2)),
    ("qwen3_5_moe_vision", TP2_EP2),
    ("qwen3_5_vision", PP2),
]
SPARSE = ("qwen3_moe", "qwen3_moe_mixed", "qwen3_next", "qwen3_5_moe")
LENGTHS = [[17, 1, 30, 5, 9], [4, 23, 2]]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in dict(CASES)}
    return {family: (folder, write_tiny(folder, family)) for family, folder in folders.items()}


def clear_rows(model, dp, *, sparse):
    """Sequences for each data-parallel rank, the first ones of which no token is near a routing tie."""
    for first in range(50):
        rows_of_dp = [sequences(lengths, seed=first + number) for number, lengths in enumerate(LENGTHS[:dp])]
        if not sparse or nearest_tie(model, [row for rows in rows_of_dp for row in rows]) > 1e-4:
            return rows_of_dp
    raise AssertionError("every batch has a token near a routing tie")


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_logits_are_transformers(ranks, checkpoints, family, layout):
    folder, model = checkpoints[family]
    rows_of_dp = clear_rows(model, layout.dp, sparse=family in SPARSE)
    results = ranks.run(logits_on_rank, layout, str(folder), rows_of_dp)
    compared = 0
    for rank, ours in enumerate(results):
        at = layout.coordinates(rank)
        if at.pp != layout.pp - 1:
            assert ours is None
            continue
        for got, want in zip(ours, transformers_logits(model, rows_of_dp[at.dp]), strict=True):
            assert want.abs().max() > 0.5
            assert (got - want).abs().max() <= 1e-4
            assert (got.log_softmax(-1) - want.log_softmax(-1)).abs().max() <= 1e-4
            compared += 1
    assert compared == layout.tp * sum(len(rows) for rows in rows_of_dp)


@pytest.mark.parametrize("layout", [ONE, PP2, EP2], ids=str)
def test_a_row_of_one_token(ranks, checkpoints, layout):
    """What a data-parallel rank that has fewer sequences than the others runs."""
    folder, model = checkpoints["qwen3_moe"]
    row = torch.tensor([5])
    results = ranks.run(logits_on_rank, layout, str(folder), [[row]] * layout.dp)
    (want,) = transformers_logits(model, [row])
    for ours in results[layout.pp - 1 :]:
        assert (ours[0] - want).abs().max() <= 1e-4


def test_probabilities_that_are_not_renormalised(ranks, tmp_path):
    model = write_tiny(tmp_path, "qwen3_moe", norm_topk_prob=False)
    rows = sequences(LENGTHS[0], seed=0)
    assert min(narrowest_margin(logits, 2) for logits in router_logits(model, rows)) > 1e-4
    ((*ours,),) = ranks.run(logits_on_rank, ONE, str(tmp_path), [rows])
    for got, want in zip(ours, transformers_logits(model, rows), strict=True):
        assert (got - want).abs().max() <= 1e-4


def test_bfloat16_checkpoint_trained_in_float32(ranks, tmp_path):
    write_tiny(tmp_path, "qwen3", dtype=torch.bfloat16)
    model = reference(tmp_path)
    rows = sequences(LENGTHS[0], seed=0)
    ((*ours,),) = ranks.run(logits_on_rank, ONE, str(tmp_path), [rows])
    for got, want in zip(ours, transformers_logits(model, rows), strict=True):
        assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize("layout", [ONE, TP2_SP], ids=str)
def test_bfloat16_model(ranks, tmp_path, layout):
    """No further from float32 than transformers' own bfloat16 forward is."""
    model = write_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)
    rows = sequences(LENGTHS[0], seed=0)
    results = ranks.run(logits_on_rank, layout, str(tmp_path), [rows], dtype=torch.bfloat16)
    theirs = torch.cat(transformers_logits(model, rows)).float()
    exact = torch.cat(transformers_logits(reference(tmp_path), rows))
    for ours in results:
        got = torch.cat(ours)
        assert got.dtype is torch.bfloat16
        assert (got.float() - exact).norm() <= 1.5 * (theirs - exact).norm()
