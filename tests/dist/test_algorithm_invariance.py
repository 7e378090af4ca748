"""Every preset and every term: loss, gradient and update of the real policy do not depend on how the batch is cut."""

import math

import algorithm_cases
import policy_ranks
import pytest
from algorithm_cases import algorithms, make_update, save_checkpoint, tokens, updates

from mcore_rl.types import Pass
from parallel.layout import ParallelLayout

ONE = ParallelLayout()
WHOLE = {"tokens_per_micro_batch": 1000}
# a row of one, of about two, of all eight answers; padded rows; ranks that share a batch, a model, a sequence
CUTS = {
    "one_a_row": (ONE, {"tokens_per_micro_batch": 36}),
    "two_a_row": (ONE, {"tokens_per_micro_batch": 60}),
    "dp2": (ParallelLayout(world=2), {"tokens_per_micro_batch": 36}),
    "pp2": (ParallelLayout(world=2, pp=2), {"tokens_per_micro_batch": 60}),
    "tp2_sp": (ParallelLayout(world=2, tp=2, sp=True), {"tokens_per_micro_batch": 60}),
    "cp2": (ParallelLayout(world=2, cp=2), {"tokens_per_micro_batch": 60}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("qwen3_tied")
    save_checkpoint(path)
    return path


@pytest.fixture(scope="module")
def logprobs(ranks, folder):
    (values,) = ranks.run(policy_ranks.scoring, ONE, folder, tokens(), Pass.OLD)
    return values[0]


@pytest.fixture(scope="module")
def cases(logprobs):
    return {name: (config, make_update(tokens(), logprobs, config)) for name, config in algorithms().items()}


@pytest.fixture(scope="module")
def expected(ranks, folder, cases):
    return ranks.run(updates, ONE, folder, cases, WHOLE)[0]


METRICS = ("clip_frac", "ratio_max", "pg_positive_adv", "pg_negative_adv", "policy_entropy_nats", "tokens")


def assert_same(got, expected):
    """Gradients and updates at 1e-5; the loss at 1e-5 of its two halves, which cancel where advantages are centred."""
    for name, wanted in expected.items():
        mine, theirs = got[name]["metrics"], wanted["metrics"]
        size = max(abs(wanted["loss"]), abs(theirs["pg_positive_adv"]) + abs(theirs["pg_negative_adv"]))
        assert abs(got[name]["loss"] - wanted["loss"]) <= 1e-5 * size, name
        policy_ranks.assert_same_gradients({**got[name], "loss": wanted["loss"]}, wanted)
        policy_ranks.assert_same_updates(got[name], wanted)
        for metric in METRICS:
            assert mine[metric] == pytest.approx(theirs[metric], rel=2e-5, nan_ok=True), (name, metric)


@pytest.mark.parametrize("cut", CUTS)
def test_how_the_batch_is_cut(ranks, folder, cases, expected, cut):
    layout, options = CUTS[cut]
    for got in ranks.run(updates, layout, folder, cases, options):
        assert_same(got, expected)


def test_order_of_the_batch(ranks, folder, logprobs, expected):
    """Advantages, correction and chosen tokens are made anew from the turned batch."""
    order = [5, 2, 7, 0, 1, 6, 3, 4]
    turned = tokens().select(order)
    made = {name: (config, make_update(turned, [logprobs[i] for i in order], config)) for name, config in algorithms().items()}
    (got,) = ranks.run(updates, ONE, folder, made, {"tokens_per_micro_batch": 60})
    assert_same(got, expected)


def test_one_rank_without_a_trained_token(ranks, folder, logprobs):
    """Seven of eight answers masked: one data-parallel rank has nothing to learn from and must not disturb the other."""
    chosen = {name: config for name, config in algorithms().items() if not config.correction.enabled}
    made = {name: (config, make_update(tokens(), logprobs, config, masked=range(7))) for name, config in chosen.items()}
    (alone,) = ranks.run(updates, ONE, folder, made, WHOLE)
    for got in ranks.run(updates, ParallelLayout(world=2), folder, made, {"tokens_per_micro_batch": 60}):
        assert_same(got, alone)


def test_the_cases_are_not_trivial(cases, expected):
    """Clips act on some and not on all, tokens are chosen, answers are rejected, and every term changes the gradient."""
    for name in ("grpo", "gspo", "gspo_token", "dapo", "dual", "rloo", "dr_grpo"):
        assert 0.0 < expected[name]["metrics"]["clip_frac"] < 1.0, name
    assert cases["grpo_pp"][1].facts["clip_cov/n_selected"] >= 1.0
    for name in ("trainer_truncate", "sampler_truncate", "trainer_mask", "sampler_none"):
        assert 0.0 < cases[name][1].facts["correction/rejected_frac"] < 1.0, name
    norms = {name: run["grad_norm"] for name, run in expected.items()}
    for name, base in (("entropy", "gspo"), ("kl_k2", "gspo"), ("kl_k3", "gspo"), ("kl_reward", "gspo_token"), ("dual", "grpo")):
        assert not math.isclose(norms[name], norms[base], rel_tol=1e-4), name
    assert all(norm > 0.0 for norm in norms.values())
