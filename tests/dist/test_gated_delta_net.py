"""GatedDeltaNet is transformers' layer in every layout: packed rows against transformers on every sample alone."""

import math
import sys

import pytest
import torch
from delta_net_ranks import (
    EPS,
    HIDDEN,
    build_without_kernel,
    fresh_decay_rates,
    operations,
    outputs_only,
    run_layer,
    sharded_pieces,
    trained,
)

from models.spec import DeltaNetSpec
from parallel.layout import ParallelLayout

sys.modules.setdefault("fla", None)  # the CPU oracle is transformers' own torch code, also where the kernels are installed
from transformers import Qwen3_5TextConfig, Qwen3NextConfig  # noqa: E402
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet  # noqa: E402
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet  # noqa: E402

SIZES = DeltaNetSpec(num_k_heads=4, num_v_heads=8, k_head_dim=6, v_head_dim=5)
FEW_HEADS = DeltaNetSpec(num_k_heads=2, num_v_heads=6, k_head_dim=5, v_head_dim=4)
LENGTHS = [65, 1, 130, 2, 64, 63]
STYLES = {"qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet), "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet)}
ONE = ParallelLayout()
TP2 = ParallelLayout(world=2, tp=2)
TP2_SP = ParallelLayout(world=2, tp=2, sp=True)
CP2 = ParallelLayout(world=2, cp=2)
TP2_CP2 = ParallelLayout(world=4, tp=2, cp=2, sp=True)


def oracle(style, sizes):
    torch.manual_seed(0)
    config, layer = STYLES[style]
    made = layer(
        config(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=sizes.num_k_heads,
            linear_num_value_heads=sizes.num_v_heads,
            linear_key_head_dim=sizes.k_head_dim,
            linear_value_head_dim=sizes.v_head_dim,
            linear_conv_kernel_dim=sizes.conv_width,
            rms_norm_eps=EPS,
        ),
        layer_idx=0,
    )
    with torch.no_grad():
        made.norm.weight.copy_(1 + 0.3 * torch.randn(sizes.v_head_dim))
        made.dt_bias.copy_(torch.randn(sizes.num_v_heads))
        made.A_log.copy_(torch.rand(sizes.num_v_heads) - 1.5)
        for name, parameter in made.named_parameters():
            if name.startswith(("in_proj", "out_proj")):
                parameter.copy_(0.2 * torch.randn(parameter.shape))
    return made


def tensors_of(layer):
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


def samples(lengths=LENGTHS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, HIDDEN, generator=generator) for length in lengths]
    return rows, [torch.randn(length, HIDDEN, generator=generator) for length in lengths]


def arguments(layer, style, sizes=SIZES):
    return {"sizes": sizes, "style": style, "tensors": tensors_of(layer)}


def name_of(value):
    """For test names: which heads, which layout."""
    if isinstance(value, DeltaNetSpec):
        return f"{value.num_k_heads}heads"
    if isinstance(value, ParallelLayout):
        return f"tp{value.tp}{'sp' * value.sp}cp{value.cp}"
    return str(value)


def expected(layer, rows, weights):
    """Outputs, input gradients and parameter gradients of transformers' layer, every sample alone."""
    layer.zero_grad()
    outputs, inputs = [], []
    for row, weight in zip(rows, weights, strict=True):
        hidden = row.clone().requires_grad_()
        output = layer(hidden[None])[0]
        (output * weight).sum().backward()
        outputs.append(output.detach())
        inputs.append(hidden.grad)
    return torch.cat(outputs), torch.cat(inputs), {name: p.grad.clone() for name, p in layer.named_parameters()}


def check_gradients(got, want):
    everything = torch.cat([gradient.flatten() for gradient in want.values()]).norm()
    for name, gradient in want.items():
        assert gradient.norm() > 1e-3 * everything / len(want), name
        assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7 * everything, name


def joined(results, sizes, style, key):
    """Hugging Face names -> whole tensors from the shards of the tensor-parallel ranks (the first ones of the layout)."""
    whole = {}
    for name, (theirs, op) in operations(sizes, style).items():
        shards = [result[key][name] for result in results]
        if not op.sharded:
            assert all(torch.equal(shard, shards[0]) for shard in shards)
        whole |= zip(theirs, op.split(op.join(shards)), strict=True)
    return whole


CASES = [
    *((style, SIZES, layout) for style in STYLES for layout in (ONE, TP2_SP, CP2)),
    ("qwen3_next", SIZES, TP2),
    ("qwen3_next", SIZES, TP2_CP2),
    ("qwen3_next", FEW_HEADS, TP2_CP2),
]


@pytest.mark.parametrize(("style", "sizes", "layout"), CASES, ids=name_of)
def test_layer_is_transformers(ranks, style, sizes, layout):
    layer = oracle(style, sizes)
    rows, weights = samples()
    outputs, inputs, gradients = expected(layer, rows, weights)
    assert outputs.abs().max() > 0.5
    results = ranks.run(run_layer, layout, **arguments(layer, style, sizes), rows=rows, weights=weights)
    for result in results:
        assert (result["output"] - outputs).abs().max() <= 1e-5
        assert (result["input"] - inputs).norm() <= 1e-5 * inputs.norm()
    for first in range(0, layout.world, layout.tp):
        check_gradients(joined(results[first : first + layout.tp], sizes, style, "gradients"), gradients)


@pytest.mark.parametrize("layout", [TP2_SP, CP2], ids=name_of)
def test_recomputation_changes_nothing(ranks, layout):
    layer = oracle("qwen3_next", SIZES)
    rows, weights = samples([30, 7])
    given = arguments(layer, "qwen3_next") | {"rows": rows, "weights": weights}
    plain = ranks.run(run_layer, layout, **given)
    again = ranks.run(run_layer, layout, **given, recompute=True)
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one["output"], other["output"])
        assert torch.equal(one["input"], other["input"])
        assert all(torch.equal(one["gradients"][name], other["gradients"][name]) for name in one["gradients"])


def test_noise_in_one_sample_leaves_its_neighbours_bits(ranks):
    layer = oracle("qwen3_next", SIZES)
    rows, _ = samples([65, 70, 3])
    noisy = [rows[0], 1e3 * torch.randn(70, HIDDEN), rows[2]]
    for clean, other in ranks.run(outputs_only, CP2, **arguments(layer, "qwen3_next"), batches=[rows, noisy]):
        assert torch.equal(clean[:65], other[:65])
        assert torch.equal(clean[135:], other[135:])
        assert not torch.equal(clean[65:135], other[65:135])


def test_swapped_a_and_b_are_seen(ranks):
    layer = oracle("qwen3_5", SIZES)
    rows, weights = samples([20])
    outputs, _, _ = expected(layer, rows, weights)
    given = arguments(layer, "qwen3_5") | {"batches": [rows]}
    tensors = given["tensors"]
    tensors["in_proj_a.weight"], tensors["in_proj_b.weight"] = tensors["in_proj_b.weight"], tensors["in_proj_a.weight"]
    ((output,),) = ranks.run(outputs_only, ONE, **given)
    assert (output - outputs).abs().max() > 1e-2


@pytest.fixture(scope="module")
def step(ranks):
    """(layer, what to train on, the step of one rank)."""
    layer = oracle("qwen3_next", SIZES)
    rows, weights = samples([40, 9])
    given = arguments(layer, "qwen3_next") | {"rows": rows, "weights": weights, "dtype": torch.float32}
    _, _, gradients = expected(layer, rows, weights)
    norm = float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm())
    assert norm > 0.5
    (one,) = ranks.run(trained, ONE, **given)
    return layer, given, norm, joined([one], SIZES, "qwen3_next", "after")


@pytest.mark.parametrize("layout", [TP2_SP, TP2, CP2, TP2_CP2], ids=name_of)
def test_gradient_norm_and_update_are_those_of_one_rank(ranks, step, layout):
    """Clipped to a twentieth: a parameter counted twice, or left out, changes every update."""
    layer, given, norm, want = step
    results = ranks.run(trained, layout, **given)
    for result in results:
        assert math.isclose(result["norm"], norm, rel_tol=1e-5)
    got = joined(results[: layout.tp], SIZES, "qwen3_next", "after")
    for name, before in tensors_of(layer).items():
        update = want[name] - before
        assert update.norm() > 0, name
        # Adam divides by the gradient's own size: where that is 1e-8, eps, its rounding shows.
        assert (got[name] - want[name]).norm() <= 1e-3 * update.norm() + 2**-23 * before.norm(), name


@pytest.mark.parametrize("layout", [ONE, TP2_SP], ids=name_of)
def test_decay_parameters_stay_float32_in_a_bfloat16_model(ranks, layout):
    """Through the bfloat16 wrapper, DDP and a step; ln 10 would be 2.296875 in bfloat16."""
    layer = oracle("qwen3_next", SIZES)
    with torch.no_grad():
        layer.A_log.fill_(math.log(10))
        layer.dt_bias.fill_(0.1234567)
    rows, weights = samples([40, 9])
    given = arguments(layer, "qwen3_next") | {"rows": rows, "weights": weights, "dtype": torch.bfloat16}
    results = ranks.run(trained, layout, **given)
    for result in results:
        assert {name for name, value in result["before"].items() if value.dtype is torch.float32} == {"A_log", "dt_bias"}
        assert result["main_grads"] == {torch.float32}
        for name in ("A_log", "dt_bias"):
            assert torch.equal(result["before"][name], tensors_of(layer)[name].chunk(layout.tp)[0])
            assert result["after"][name].dtype is torch.float32
            step = (result["after"][name] - result["before"][name]).abs()
            assert step.max() <= 1.01e-3  # Adam's first step is the learning rate, far below bfloat16's grid at ln 10
            assert step.min() > 0
        assert ((result["before"]["A_log"].exp() - 10).abs() <= 1e-5).all()


def test_new_decay_rates_of_a_bfloat16_model_are_finite(ranks):
    """Ten thousand heads: drawn in bfloat16, some would be 0 and their logarithm minus infinity."""
    sizes = DeltaNetSpec(num_k_heads=2500, num_v_heads=10_000, k_head_dim=1, v_head_dim=1)
    ((a_log, dt_bias),) = ranks.run(fresh_decay_rates, ONE, sizes)
    assert a_log.shape == (10_000,)
    assert a_log.dtype is dt_bias.dtype is torch.float32
    assert bool(a_log.isfinite().all() and dt_bias.isfinite().all())
    assert 0.0 < float(a_log.exp().min()) < 0.05
    assert 15.9 < float(a_log.exp().max()) <= 16.001


def test_a_distributed_checkpoint_holds_the_same_tensors_at_any_tp(ranks):
    """Sections apart: what two ranks write tiles exactly what one rank reads."""
    given = arguments(oracle("qwen3_next", SIZES), "qwen3_next")
    (one,) = ranks.run(sharded_pieces, ONE, **given)
    whole = {key: data for key, _, _, data in one}
    assert {f"layer.in_proj.weight.{name}" for name in ("query", "key", "value", "z", "beta", "alpha")} <= whole.keys()
    assembled = {key: torch.full_like(data, torch.nan) for key, data in whole.items()}
    for pieces in ranks.run(sharded_pieces, TP2, **given):
        for key, shape, offset, data in pieces:
            assert shape == whole[key].shape
            assembled[key][tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))] = data
    assert all(torch.equal(assembled[key], data) for key, data in whole.items())


def test_a_missing_kernel_is_refused_by_name(ranks):
    (message,) = ranks.run(build_without_kernel, ONE, SIZES)
    assert "flash-linear-attention" in message
