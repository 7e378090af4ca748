"""One update of the hybrid and mixed families: one rank has transformers' gradient, every layout has the one rank's.

The loss is GSPO on packed rows of uneven sequences, different ones on each data-parallel rank.
"""

import policy_ranks
import pytest
import torch
from model_ranks import loaded
from policy_cases import rollouts, with_old
from policy_reference import reference_gradients, reference_logprobs, reference_loss
from tiny_models import VOCAB, router_logits, write_tiny

from parallel.layout import ParallelLayout

ONE = ParallelLayout()
TP2_SP = ParallelLayout(world=2, tp=2, sp=True)
TP2 = ParallelLayout(world=2, tp=2)
EP2 = ParallelLayout(world=2, ep=2)
PP2 = ParallelLayout(world=2, pp=2)
TP2_EP2 = ParallelLayout(world=4, tp=2, ep=2, sp=True)
FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_moe_mixed")
CASES = [
    ("qwen3_next", PP2),
    ("qwen3_next", TP2_EP2),
    ("qwen3_5", TP2),
    ("qwen3_5", PP2),
    ("qwen3_5_moe", TP2_SP),
    ("qwen3_moe_mixed", EP2),
    ("qwen3_moe_mixed", PP2),
]
SGD = {"sgd": 0.1}


@pytest.fixture(scope="module")
def cases(ranks, tmp_path_factory):
    """Family -> folder, transformers' model (float64, but for its delta rule, which is float32), batch, the one rank's run."""
    made = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        model = write_tiny(folder, family).double()
        model.config._experts_implementation = "eager"  # torch's grouped matmul knows no float64
        batch = rollouts(vocab=VOCAB)
        batch = with_old(batch, [row.float() for row in reference_logprobs(model, batch.tokens)[0]])
        (one,) = ranks.run(policy_ranks.one_update, ONE, folder, batch, SGD)
        made[family] = folder, model, batch, one
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_is_transformers(cases, family):
    _, model, batch, one = cases[family]
    if family != "qwen3_5":
        ranked = [logits.softmax(-1).topk(3, dim=-1).values for logits in router_logits(model, list(batch.tokens.token_ids))]
        assert min(float((top[:, 1] - top[:, 2]).min()) for top in ranked) > 1e-5
    loss = reference_loss(model, batch)
    loss.backward()
    gradients = reference_gradients(model)
    norm = sum(float(grad.double().square().sum()) for grad in gradients.values()) ** 0.5
    assert min(float(grad.norm()) for grad in gradients.values()) > 0.0
    policy_ranks.assert_same_gradients(one, {"loss": loss.item(), "grad_norm": norm, "gradients": gradients})


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_layouts_agree_with_one_rank(ranks, cases, family, layout):
    folder, _, batch, one = cases[family]
    for got in ranks.run(policy_ranks.one_update, layout, folder, batch, SGD):
        policy_ranks.assert_same_gradients(got, one)
        policy_ranks.assert_same_updates(got, one)


def bfloat16_update_on_rank(groups, device, folder, batch):
    """Loss of one update of a bf16 model, and every decay rate before and after."""
    _, chunks = loaded(groups, folder, dtype=torch.bfloat16)
    policy = policy_ranks.make_policy(groups, folder, chunks=chunks)
    before = policy_ranks.full_tensors(policy.weights())
    loss = policy.update(batch).loss
    after = policy_ranks.full_tensors(policy.weights())
    return loss, {name: (before[name], after[name]) for name in after if name.endswith(("A_log", "dt_bias"))}


@pytest.mark.parametrize("layout", [TP2_SP, EP2], ids=str)
def test_decay_rates_of_a_bfloat16_model_learn_in_float32(ranks, cases, layout):
    """Adam's first step is the learning rate, 1e-3: less than half a step of bf16 at most of these values."""
    folder, _, batch, one = cases["qwen3_next"]
    for loss, rates in ranks.run(bfloat16_update_on_rank, layout, folder, batch):
        assert abs(loss - one["loss"]) <= 0.05 * abs(one["loss"])
        assert len(rates) == 2 * 3
        for before, after in rates.values():
            assert before.dtype is after.dtype is torch.float32
            torch.testing.assert_close((after - before).abs(), torch.full_like(before, 1e-3), rtol=0.02, atol=1e-6)
