"""One GSPO update of a small Qwen3-MoE in fp32 is the same on one rank and on every layout, and the gradient is right.

The reference for one rank is transformers in float64 with the loss written out; the reference for layouts is one rank.
"""

import policy_ranks
import pytest
import torch
from policy_cases import rollouts, save_checkpoint, with_old
from policy_reference import reference_gradients, reference_logprobs, reference_loss
from tiny_models import nearest_tie

from mcore_rl.config.schema import OptimizerConfig
from mcore_rl.types import Pass
from parallel.layout import ParallelLayout

ONE = ParallelLayout()
LAYOUTS = [
    ParallelLayout(world=2, tp=2, sp=True),
    ParallelLayout(world=2, ep=2),
    ParallelLayout(world=2, pp=2),
    ParallelLayout(world=2),
    ParallelLayout(world=4, tp=2, ep=2, sp=True),
    ParallelLayout(world=4, pp=2, ep=2),
    ParallelLayout(world=4, cp=2, ep=2),
    ParallelLayout(world=4, tp=2, cp=2, sp=True),
    ParallelLayout(world=2, pp=2, vpp=2),
    ParallelLayout(world=2, pp=2, first_stage_layers=1),
    ParallelLayout(world=2, etp=2),
]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """The checkpoint's folder, transformers' model in float64, and a batch of which some sequences are clipped."""
    folder = tmp_path_factory.mktemp("qwen3_moe")
    model = save_checkpoint(folder).double()
    batch = rollouts()
    return folder, model, with_old(batch, [row.float() for row in reference_logprobs(model, batch.tokens)[0]])


@pytest.fixture(scope="module")
def one_rank(ranks, case):
    """One rank with SGD, and the options of an Adam step with eps = 1e-3 of the gradient's root mean square."""
    folder, _, batch = case
    (sgd,) = ranks.run(policy_ranks.one_update, ONE, folder, batch, {"sgd": 0.1})
    eps = 1e-3 * rms(torch.cat([grad.flatten() for grad in sgd["gradients"].values()]))
    return sgd, {"optimizer": OptimizerConfig(lr=1e-3, clip_grad=0.0, eps=eps)}


def rms(tensor):
    return float(tensor.double().square().mean().sqrt())


def adam_step(gradient, lr, eps):
    """Adam's first step by its definition: both moments are bias-corrected to g and g^2."""
    return -lr * gradient.double() / (gradient.double().abs() + eps)


def assert_adam_by_definition(got, lr, eps):
    """What the layout's own optimizer did is Adam's step on the layout's own gradient, to the weight's rounding."""
    for name, before in got["before"].items():
        moved = got["after"][name].double() - before.double()
        wanted = adam_step(got["gradients"][name], lr, eps)
        assert (moved - wanted).norm() <= 1e-5 * wanted.norm() + 2**-23 * before.double().norm(), name


def assert_same_adam_steps(got, expected):
    """Per tensor, eps = 1e-3 rms(its gradient), lr so that it moves by 1e-3 of itself: 1e-5 of the step plus 2^-23 of it.

    One real run has one lr and one eps; by definition of the step (checked above) the gradients tell it for every tensor.
    """
    for name, grad in expected["gradients"].items():
        if not grad.any():
            assert not got["gradients"][name].any(), name
            continue
        eps, weight = 1e-3 * rms(grad), expected["before"][name].double()
        wanted = adam_step(grad, 1.0, eps)
        lr = float(1e-3 * weight.norm() / wanted.norm())
        error = (adam_step(got["gradients"][name], lr, eps) - lr * wanted).norm()
        assert error <= 1e-5 * (lr * wanted).norm() + 2**-23 * weight.norm(), f"{name}: {error:.2e}"


def test_no_token_is_near_a_routing_tie(case):
    _, model, batch = case
    assert nearest_tie(model, batch.tokens.token_ids) > 1e-4


def test_one_rank_is_transformers(case, one_rank):
    _, model, batch = case
    model.zero_grad()
    loss = reference_loss(model, batch)
    loss.backward()
    gradients = reference_gradients(model)
    norm = sum(float(grad.double().square().sum()) for grad in gradients.values()) ** 0.5
    policy_ranks.assert_same_gradients(one_rank[0], {"loss": loss.item(), "grad_norm": norm, "gradients": gradients})
    assert 0.0 < one_rank[0]["metrics"]["clip_frac"] < 1.0


def test_values_are_transformers(ranks, case):
    folder, model, batch = case
    with torch.no_grad():
        expected = reference_logprobs(model, batch.tokens)
    (got,) = ranks.run(policy_ranks.scoring, ONE, folder, batch.tokens, Pass.EVAL)
    for ours, theirs in zip(got, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_sgd_moves_by_the_gradient(one_rank):
    sgd = one_rank[0]
    for name, before in sgd["before"].items():
        moved = before.double() - sgd["after"][name].double()
        assert (moved - 0.1 * sgd["gradients"][name].double()).norm() <= 2**-23 * before.double().norm(), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_agree_with_one_rank(ranks, case, one_rank, layout):
    folder, _, batch = case
    sgd, adam = one_rank
    for got in ranks.run(policy_ranks.one_update, layout, folder, batch, {"sgd": 0.1}):
        policy_ranks.assert_same_gradients(got, sgd)
        policy_ranks.assert_same_updates(got, sgd)
        for ours, theirs in zip(got["logprobs"], sgd["logprobs"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert got["metrics"]["clip_frac"] == sgd["metrics"]["clip_frac"]
        assert got["metrics"]["tokens"] == sgd["metrics"]["tokens"] == sum(int(mask.sum()) for mask in batch.tokens.loss_mask)
        assert [layer["load_E"] for layer in got["routing"]] == [layer["load_E"] for layer in sgd["routing"]]
    for got in ranks.run(policy_ranks.one_update, layout, folder, batch, adam):
        assert_adam_by_definition(got, adam["optimizer"].lr, adam["optimizer"].eps)
        assert_same_adam_steps(got, sgd)


@pytest.mark.parametrize("layout", [ONE, *LAYOUTS[:4]], ids=str)
def test_clipping_uses_the_global_norm(ranks, case, one_rank, layout):
    """Adam ignores a common factor of the gradient but for eps, which is large here: the step then shows the clipping."""
    folder, _, batch = case
    norm = one_rank[0]["grad_norm"]
    options = {"optimizer": OptimizerConfig(lr=1.0, clip_grad=0.1 * norm, eps=100.0)}
    got = ranks.run(policy_ranks.one_update, layout, folder, batch, options)[0]
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-5)
    for name, before in got["before"].items():
        moved, wanted = before.double() - got["after"][name].double(), one_rank[0]["gradients"][name].double() * 0.1
        expected = wanted / (wanted.abs() + 100.0)
        assert (moved - expected).norm() <= 2e-5 * expected.norm() + 2**-23 * before.double().norm() + 1e-9 * norm, name
