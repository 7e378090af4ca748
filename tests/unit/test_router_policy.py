"""The router policy as data, its noise, and the sums of one routing row by hand."""

import math

import pytest
import torch

from mcore_rl.policy_metrics import routing_layers
from models.router_policy import RouterControl, RouterPass, RouterPolicy, RoutingSums, routing_row

MASK = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mode": "melt"}, "router.mode = 'melt' is unknown; known: plain, freeze, jitter"),
        ({"mode": "jitter"}, "router.jitter_eps = 0.0 must lie between 0 and 1"),
        ({"mode": "jitter", "jitter_eps": 1.0}, "router.jitter_eps = 1.0 must lie between 0 and 1"),
        ({"mode": "freeze", "jitter_eps": 0.1}, "has no effect when router.mode is freeze"),
    ],
)
def test_policies_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RouterPolicy(**fields)


def test_passes_have_names():
    with pytest.raises(ValueError, match="router pass 'training' is unknown; known: train, old, reference, probe, eval"):
        RouterPass("training", MASK)
    with pytest.raises(RuntimeError, match="outside any named pass"):
        RouterControl().running()


@pytest.mark.parametrize("mode", ["plain", "freeze", "jitter"])
def test_only_jitter_in_training_adds_noise(mode):
    control = RouterControl(RouterPolicy(mode, 0.1 if mode == "jitter" else 0.0))
    acts = {name: control.jitters(RouterPass(name, MASK)) for name in ("train", "old", "reference", "probe", "eval")}
    assert acts == dict.fromkeys(acts, False) | {"train": mode == "jitter"}


def test_noise_is_a_function_of_its_names():
    like = torch.zeros(40, 1, 50)

    def noise(*, seed=1, step=0, micro_batch=0, layer=0, stream=(0,)):
        control = RouterControl(RouterPolicy("jitter", 0.1, seed), stream)
        return control.noise(RouterPass("train", MASK, step=step, micro_batch=micro_batch), layer, like)

    first = noise()
    torch.manual_seed(99)
    assert torch.equal(noise(), first)
    others = [noise(seed=2), noise(step=1), noise(micro_batch=1), noise(layer=1), noise(stream=(1,))]
    assert not any(torch.equal(other, first) for other in others)
    assert 0.9 <= float(first.min()) < 0.902
    assert 1.098 < float(first.max()) <= 1.1
    assert float(first.mean()) == pytest.approx(1.0, abs=0.005)


def test_noise_leaves_other_generators_alone():
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    RouterControl(RouterPolicy("jitter", 0.1)).noise(RouterPass("train", MASK), 0, torch.zeros(4))
    assert torch.equal(torch.rand(3), want)


def test_routing_row_by_hand():
    p = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.1, 0.2, 0.3, 0.4]])
    chosen = torch.tensor([[True, True, False, False], [False, False, True, True]])
    tokens, entropy, margin, *rest = routing_row(p.log(), chosen, 2).tolist()
    replay, load = rest[:4], rest[4:]
    first = 0.5 * math.log(2) + 0.25 * math.log(4) + 0.25 * math.log(8)
    second = -sum(x * math.log(x) for x in (0.1, 0.2, 0.3, 0.4))
    assert tokens == 2.0
    assert entropy == pytest.approx(first + second, rel=1e-6)
    assert margin == pytest.approx((0.25 - 0.125) + (0.3 - 0.2), rel=1e-6)
    assert replay == [0.0, 0.0, 0.0, 0.0]
    assert load == [1.0, 1.0, 1.0, 1.0]


def test_routing_row_where_every_expert_is_chosen():
    row = routing_row(torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool), 2)
    assert row.tolist() == pytest.approx([3.0, 3 * math.log(2), 0.0, 0.0, 0.0, 0.0, 0.0, 3.0, 3.0])


def test_the_largest_load_over_the_mean_by_hand():
    """Eight tokens, one of four experts each: 6, 2, 0 and 0, so three times the mean of 2, and two dead experts."""
    chosen = torch.nn.functional.one_hot(torch.tensor([0] * 6 + [1] * 2), 4).bool()
    row = routing_row(torch.zeros(8, 4), chosen, 1)
    (layer,) = routing_layers(RoutingSums.of_table((5,), row[None]))
    assert (layer.layer, layer.tokens, layer.load_E) == (5, 8, (6.0, 2.0, 0.0, 0.0))
    assert (layer.max_over_mean_load, layer.dead_experts) == (3.0, 2)
    assert layer.router_entropy_nats == pytest.approx(math.log(4))


def test_counts_are_exact_where_bfloat16_would_round_them():
    """40,840 would become 40,960 or 40,704."""
    counts = [40_840, 40_960, 3]
    chosen = torch.nn.functional.one_hot(torch.arange(3).repeat_interleave(torch.tensor(counts)), 3).bool()
    row = routing_row(torch.zeros(sum(counts), 3, dtype=torch.bfloat16), chosen, 1)
    assert row.dtype is torch.float64
    assert row[0] == sum(counts)
    assert (row + row)[-3:].tolist() == [81_680, 81_920, 6]
