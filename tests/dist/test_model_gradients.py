"""One update of the hybrid and mixed families: one rank has transformers' gradient, every layout has the one rank's.

The loss is GSPO on packed rows of uneven sequences, different ones on each data-parallel rank.
"""

import policy_ranks
import pytest
import torch
from model_ranks import loaded
from parity_cells import make_case

from mcore_rl.config.schema import OptimizerConfig
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
CLIPPED = [TP2_EP2, ParallelLayout(world=4, tp=2, ep=2, etp=2, sp=True), ParallelLayout(world=4, ep=4)]
SGD = {"sgd": 0.1}


@pytest.fixture(scope="module")
def cases(ranks, tmp_path_factory):
    """Family -> the case (transformers in float64, but for its delta rule, which is float32) and the one rank's run."""
    made = {}
    for family in FAMILIES:
        experts = {} if family == "qwen3_5" else {"num_experts": 8}
        case = make_case(tmp_path_factory.mktemp(family), family, **experts)
        (one,) = ranks.run(policy_ranks.one_update, ONE, case.folder, case.batch, SGD)
        made[family] = case, one
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_is_transformers(cases, family):
    case, one = cases[family]
    norm = sum(float(grad.double().square().sum()) for grad in case.gradients.values()) ** 0.5
    assert min(float(grad.norm()) for grad in case.gradients.values()) > 0.0
    policy_ranks.assert_same_gradients(one, {"loss": case.loss, "grad_norm": norm, "gradients": case.gradients})


@pytest.mark.parametrize(("family", "layout"), CASES, ids=str)
def test_layouts_agree_with_one_rank(ranks, cases, family, layout):
    case, one = cases[family]
    for got in ranks.run(policy_ranks.one_update, layout, case.folder, case.batch, SGD):
        policy_ranks.assert_same_gradients(got, one)
        policy_ranks.assert_same_updates(got, one)


@pytest.mark.parametrize("layout", CLIPPED, ids=str)
@pytest.mark.parametrize("family", ["qwen3_moe_mixed", "qwen3_5_moe"])
def test_a_clipped_update(ranks, cases, family, layout):
    """The norm counts every parameter once (experts, decay rates, convolutions, gates), and the clipped step is that of one
    rank. Adam shows a common factor of the gradient where eps is large."""
    case, one = cases[family]
    norm = one["grad_norm"]
    options = {"optimizer": OptimizerConfig(lr=1.0, clip_grad=0.1 * norm, eps=100.0)}
    for got in ranks.run(policy_ranks.one_update, layout, case.folder, case.batch, options):
        assert abs(got["grad_norm"] - norm) <= 1e-5 * norm
        for name, before in got["before"].items():
            moved, factor = before.double() - got["after"][name].double(), one["gradients"][name].double() * 0.1
            wanted = factor / (factor.abs() + 100.0)
            assert (moved - wanted).norm() <= 2e-5 * wanted.norm() + 2**-23 * before.double().norm() + 1e-9 * norm, name


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
    case, one = cases["qwen3_next"]
    folder, batch = case.folder, case.batch
    for loss, rates in ranks.run(bfloat16_update_on_rank, layout, folder, batch):
        assert abs(loss - one["loss"]) <= 0.05 * abs(one["loss"])
        assert len(rates) == 2 * 3
        for before, after in rates.values():
            assert before.dtype is after.dtype is torch.float32
            torch.testing.assert_close((after - before).abs(), torch.full_like(before, 1e-3), rtol=0.02, atol=1e-6)
