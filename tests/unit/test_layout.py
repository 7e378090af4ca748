"""Every layout that cannot be is refused with the numbers that do not divide; rank maps are those of Megatron's order."""

import dataclasses
import subprocess
import sys

import pytest

from parallel.layout import Coordinates, ModelDims, ParallelLayout

MOE = ModelDims(num_layers=4, num_heads=8, num_kv_heads=4, hidden=64, ffn=128, num_experts=8, moe_ffn=32, vocab_size=100)
DENSE = dataclasses.replace(MOE, num_experts=None, moe_ffn=None)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 0}, "layout.world=0 must be at least 1"),
        ({"tp": 0}, "layout.tp=0 must be at least 1"),
        ({"world": 2, "pp": -1}, "layout.pp=-1 must be at least 1"),
        ({"ep": 0}, "layout.ep=0 must be at least 1"),
        ({"etp": 0}, "layout.etp=0 must be at least 1"),
        ({"cp": 0}, "layout.cp=0 must be at least 1"),
        ({"world": 2, "pp": 2, "vpp": 0}, "layout.vpp=0 must be at least 1, or null"),
        ({"world": 2, "tp": 4}, "layout.world=2 is not a multiple of tp x pp x cp = 4 x 1 x 1 = 4"),
        ({"world": 6, "tp": 2, "pp": 2}, "layout.world=6 is not a multiple of tp x pp x cp = 2 x 2 x 1 = 4"),
        ({"world": 4, "cp": 3}, "layout.world=4 is not a multiple of tp x pp x cp = 1 x 1 x 3 = 3"),
        ({"world": 4, "ep": 3}, "layout.world=4 is not a multiple of ep x etp x pp = 3 x 1 x 1 = 3"),
        ({"world": 4, "ep": 2, "etp": 4}, "layout.world=4 is not a multiple of ep x etp x pp = 2 x 4 x 1 = 8"),
        ({"world": 2, "pp": 2, "ep": 2}, "layout.world=2 is not a multiple of ep x etp x pp = 2 x 1 x 2 = 4"),
        ({"sp": True}, "layout.sp=True needs layout.tp > 1"),
        ({"vpp": 2}, "layout.vpp=2 needs layout.pp > 1"),
        ({"first_stage_layers": 2}, "layout.first_stage_layers=2 needs layout.pp > 1"),
        ({"world": 2, "pp": 2, "last_stage_layers": 0}, "layout.last_stage_layers=0 must be at least 1, or null"),
    ],
)
def test_sizes_that_no_model_fits(sizes, message):
    with pytest.raises(ValueError, match="layout") as caught:
        ParallelLayout(**sizes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "dims", "message"),
    [
        ({"world": 3, "ep": 3}, MOE, "layout.ep=3 does not divide 8 experts"),
        ({"world": 3, "etp": 3}, MOE, "layout.etp=3 does not divide 32 expert ffn columns"),
        ({"world": 16, "tp": 16, "sp": True}, MOE, "layout.tp=16 does not divide 8 attention heads"),
        ({"world": 8, "tp": 8, "sp": True}, MOE, "layout.tp=8 does not divide 4 key-value heads"),
        ({"world": 4, "tp": 4}, dataclasses.replace(DENSE, ffn=6), "layout.tp=4 does not divide 6 ffn columns"),
        ({"world": 3, "pp": 3}, MOE, "layout.pp x vpp = 3 x 1 = 3 does not divide 4 layers"),
        ({"world": 4, "pp": 4}, dataclasses.replace(MOE, num_layers=30), "pp x vpp = 4 x 1 = 4 does not divide 30 layers"),
        ({"world": 4, "ep": 4}, dataclasses.replace(MOE, num_experts=6), "layout.ep=4 does not divide 6 experts"),
        ({"world": 2, "pp": 2, "vpp": 4}, MOE, "layout.pp x vpp = 2 x 4 = 8 does not divide 4 layers"),
        (
            {"world": 2, "pp": 2, "first_stage_layers": 4},
            MOE,
            "layout.first_stage_layers=4 of 4 layers leaves 0 for the other 1 stages; layout.pp x vpp = 2 x 1 = 2",
        ),
        (
            {"world": 2, "pp": 2, "first_stage_layers": 1, "last_stage_layers": 2},
            MOE,
            "layout.first_stage_layers=1 and layout.last_stage_layers=2 of 4 layers leaves 1 for the other 0 stages",
        ),
        (
            {"world": 3, "pp": 3, "first_stage_layers": 1},
            MOE,
            "layout.first_stage_layers=1 of 4 layers leaves 3 for the other 2 stages",
        ),
        (
            {"world": 2, "pp": 2, "vpp": 2, "first_stage_layers": 1},
            MOE,
            "layout.first_stage_layers=1 is not a multiple of layout.vpp=2",
        ),
        ({"world": 2, "ep": 2}, DENSE, "layout.ep=2 needs a model with experts"),
        ({"world": 2, "etp": 2}, DENSE, "layout.etp=2 needs a model with experts"),
        ({"world": 2, "tp": 2}, MOE, "layout.tp=2 of a mixture-of-experts model needs layout.sp=True"),
    ],
)
def test_sizes_that_this_model_does_not_fit(sizes, dims, message):
    with pytest.raises(ValueError, match="layout") as caught:
        ParallelLayout(**sizes).validate(dims)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ({}, DENSE),
        ({"world": 2, "tp": 2}, DENSE),
        ({"world": 2, "ep": 2}, MOE),
        ({"world": 8, "tp": 2, "ep": 4, "sp": True}, MOE),
        ({"world": 8, "tp": 4, "ep": 2, "etp": 2, "pp": 2, "vpp": 2, "sp": True}, MOE),
    ],
)
def test_layouts_that_fit(sizes, dims):
    ParallelLayout(**sizes).validate(dims)


def test_data_parallel_sizes():
    layout = ParallelLayout(world=16, tp=2, pp=2, ep=4, sp=True)
    assert (layout.dp, layout.edp, layout.chunks, layout.token_multiple, layout.micro_batch_multiple) == (4, 2, 1, 2, 1)
    layout = ParallelLayout(world=8, pp=2, vpp=2, cp=2)
    assert (layout.dp, layout.edp, layout.chunks, layout.token_multiple, layout.micro_batch_multiple) == (2, 4, 2, 4, 2)


@pytest.mark.parametrize(
    ("sizes", "chunks"),
    [
        ({}, [[[0, 1, 2, 3, 4, 5, 6, 7]]]),
        ({"world": 2, "pp": 2}, [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]),
        ({"world": 2, "pp": 2, "first_stage_layers": 3}, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
        ({"world": 2, "pp": 2, "first_stage_layers": 3, "last_stage_layers": 5}, [[[0, 1, 2]], [[3, 4, 5, 6, 7]]]),
        ({"world": 2, "pp": 2, "vpp": 2}, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]),
        ({"world": 2, "pp": 2, "vpp": 2, "first_stage_layers": 2}, [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]),
        ({"world": 3, "pp": 3, "vpp": 2, "last_stage_layers": 4}, [[[0], [4]], [[1], [5]], [[2, 3], [6, 7]]]),
        ({"world": 4, "pp": 4, "first_stage_layers": 1, "last_stage_layers": 3}, [[[0]], [[1, 2]], [[3, 4]], [[5, 6, 7]]]),
    ],
)
def test_layers_of_every_chunk_by_hand(sizes, chunks):
    layout = ParallelLayout(**sizes)
    for rank, held in enumerate(chunks):
        assert [list(layout.chunk_layers(8, rank, chunk)) for chunk in range(layout.chunks)] == held
        assert all(layout.stage_of_layer(8, layer) == rank for layers in held for layer in layers)


@pytest.mark.parametrize(
    ("layers", "sizes", "first"),
    [
        (8, {"world": 2, "pp": 2, "vpp": 2}, {(0, 0): 0, (1, 0): 2, (0, 1): 4, (1, 1): 6}),
        (
            14,
            {"world": 4, "pp": 4, "vpp": 2, "last_stage_layers": 2},
            {(1, 0): 2, (2, 0): 4, (3, 0): 6, (0, 1): 7, (3, 1): 13},
        ),
        (14, {"world": 4, "pp": 4, "vpp": 2, "first_stage_layers": 2}, {(1, 0): 1, (3, 0): 5, (1, 1): 8}),
    ],
)
def test_first_layer_of_a_stages_chunk_by_hand(layers, sizes, first):
    layout = ParallelLayout(**sizes)
    assert {place: layout.chunk_layers(layers, *place)[0] for place in first} == first
    held = [layer for stage in range(layout.pp) for chunk in range(2) for layer in layout.chunk_layers(layers, stage, chunk)]
    assert sorted(held) == list(range(layers))


def test_coordinates_by_hand():
    """world 8 = tp 2 x dp 2 x pp 2 for dense layers, etp 1 x ep 2 x edp 2 x pp 2 for experts."""
    layout = ParallelLayout(world=8, tp=2, pp=2, ep=2, sp=True)
    assert layout.coordinates(0) == Coordinates(tp=0, cp=0, dp=0, pp=0, etp=0, ep=0, edp=0)
    assert layout.coordinates(1) == Coordinates(tp=1, cp=0, dp=0, pp=0, etp=0, ep=1, edp=0)
    assert layout.coordinates(2) == Coordinates(tp=0, cp=0, dp=1, pp=0, etp=0, ep=0, edp=1)
    assert layout.coordinates(7) == Coordinates(tp=1, cp=0, dp=1, pp=1, etp=0, ep=1, edp=1)


def test_context_parallel_varies_before_data_parallel():
    layout = ParallelLayout(world=4, cp=2)
    assert [(layout.coordinates(rank).cp, layout.coordinates(rank).dp) for rank in range(4)] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_every_place_is_taken_once():
    layout = ParallelLayout(world=24, tp=2, cp=3, pp=2, ep=4)
    places = [layout.coordinates(rank) for rank in range(24)]
    assert len({(at.tp, at.cp, at.dp, at.pp) for at in places}) == 24
    assert len({(at.etp, at.ep, at.edp, at.pp) for at in places}) == 24


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank {rank} is not in a layout of 2 ranks"):
        ParallelLayout(world=2).coordinates(rank)


def test_layout_does_not_import_megatron_or_torch():
    code = "import sys, parallel.layout; print(sorted({'megatron', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
