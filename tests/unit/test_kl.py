"""KL estimators: worked values, exact expectations of value and gradient over a small vocabulary, and the KL in the reward."""

import math

import pytest
import torch

from mcore_rl.algorithms.advantages import compute_advantages
from mcore_rl.algorithms.kl import kl_reward, kl_values
from mcore_rl.config.algorithm import AlgorithmConfig, Baseline, KlConfig, KlEstimator
from mcore_rl.types import TokenBatch, TrainBatch
from mcore_rl.update_terms import needs_old, with_kl_reward

ALL = torch.ones(1, dtype=torch.bool)


def test_worked_values():
    # logp -1, ref -2: k1 = 1, k2 = .5, k3 = e^-1, dk3/dlogp = 1 - e^-1
    expected = {KlEstimator.k1: (1.0, 1.0), KlEstimator.k2: (0.5, 1.0), KlEstimator.k3: (math.exp(-1), 1 - math.exp(-1))}
    for estimator, (value, slope) in expected.items():
        logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        found = kl_values(logp, torch.tensor([-2.0]).double(), ALL, estimator)
        (grad,) = torch.autograd.grad(found.sum(), logp)
        assert (float(found), float(grad)) == pytest.approx((value, slope), rel=1e-12)


def test_k3_of_a_policy_that_drifted_far():
    """Growing drift never stops costing: e^-x - 1 + x above, its tangent at -20 below; as exact as expm1 close to 0."""
    for gap, value, slope in (
        (30.0, 29.0, 1.0),
        (21.0, 20.0, 1.0),
        (1e-4, 4.99983334e-9, 9.9995e-5),
        (-25.0, 6 * math.exp(20) - 26, 1 - math.exp(20)),
    ):
        logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
        found = kl_values(logp, torch.tensor([-1.0 - gap], dtype=torch.float64), ALL, KlEstimator.k3)
        (grad,) = torch.autograd.grad(found.sum(), logp)
        assert (float(found), float(grad)) == pytest.approx((value, slope), rel=1e-6)


@pytest.fixture
def categorical():
    """Logits of pi (to differentiate) and log-probs of the reference over three tokens."""
    logits = torch.tensor([0.3, -1.1, 0.7], dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor([-0.2, 0.5, 0.1], dtype=torch.float64).log_softmax(0)


def expectation(logits, reference, estimator):
    """Mean of the estimator under pi, and the mean of its gradient: the samples' distribution itself is not differentiated."""
    logp = logits.log_softmax(0)
    values = kl_values(logp, reference, torch.ones(3, dtype=torch.bool), estimator)
    mean = (logp.detach().exp() * values).sum()
    return float(mean.detach()), torch.autograd.grad(mean, logits, retain_graph=True)[0]


def exact(logits, reference, *, reverse):
    logp = logits.log_softmax(0)
    kl = (logp.exp() * (logp - reference)).sum() if reverse else (reference.exp() * (reference - logp)).sum()
    return float(kl.detach()), torch.autograd.grad(kl, logits, retain_graph=True)[0]


def test_what_each_estimator_is_unbiased_for(categorical):
    value, reverse = exact(*categorical, reverse=True)
    _, forward = exact(*categorical, reverse=False)
    found = {estimator: expectation(*categorical, estimator) for estimator in KlEstimator}
    assert found[KlEstimator.k1][0] == pytest.approx(value) == found[KlEstimator.k3][0]
    assert abs(found[KlEstimator.k2][0] - value) > 1e-3
    torch.testing.assert_close(found[KlEstimator.k1][1], torch.zeros(3).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[KlEstimator.k2][1], reverse)
    torch.testing.assert_close(found[KlEstimator.k3][1], forward)
    assert (forward - reverse).norm() > 0.1 * reverse.norm()


def test_k1_in_the_reward_has_k2s_gradient(categorical):
    """Policy gradient of the reward -coef k1 equals minus coef times the exact gradient of the reverse KL."""
    logits, reference = categorical
    logp = logits.log_softmax(0)
    reward = kl_reward(logp, reference, torch.ones(3, dtype=torch.bool), 0.1)
    assert not reward.requires_grad
    (ascent,) = torch.autograd.grad((logp.detach().exp() * logp * reward).sum(), logits, retain_graph=True)
    torch.testing.assert_close(ascent, -0.1 * exact(*categorical, reverse=True)[1])


def update(rewards, olds, references):
    tokens = TokenBatch(
        tuple(torch.arange(len(old)) for old in olds),
        tuple(torch.arange(len(old)) > 0 for old in olds),
        tuple(f"p/{i}" for i in range(len(olds))),
    )
    found = compute_advantages(rewards, ["p"] * len(olds), tokens.sample_ids, baseline=Baseline.group_mean_std, ddof=1)
    weights = tuple(mask.float() for mask in tokens.loss_mask)
    return TrainBatch(tokens, weights, found.values, old_logprobs=tuple(olds), reference_logprobs=tuple(references))


def test_kl_never_feeds_a_unanimous_group():
    """All wrong: the task's advantage is exactly 0, and the KL comes in at its own size, whatever its spread."""
    olds = [torch.tensor([9.0, -1.0, -2.0]), torch.tensor([9.0, -0.5])]
    references = [torch.tensor([7.0, -1.5, -2.0]), torch.tensor([7.0, -0.5001])]
    made = update([0.0, 0.0], olds, references)
    assert made.advantages.tolist() == [0.0, 0.0]
    config = AlgorithmConfig(kl=KlConfig(coef=0.01))
    shifted = with_kl_reward(made, config)
    assert torch.equal(shifted.advantages, made.advantages)
    torch.testing.assert_close(shifted.advantage_shift[0], torch.tensor([0.0, -0.005, 0.0]))
    torch.testing.assert_close(shifted.advantage_shift[1], torch.tensor([0.0, -1e-6]), rtol=1e-3, atol=0)
    assert needs_old(config) and not needs_old(AlgorithmConfig()) and with_kl_reward(made, AlgorithmConfig()) is made


def test_a_missing_reference_is_an_error():
    made = update([0.0, 1.0], [torch.zeros(2)] * 2, [torch.zeros(2)] * 2)
    with pytest.raises(ValueError, match=r"kl\.coef=0\.01 in the reward"):
        with_kl_reward(TrainBatch(made.tokens, made.token_weights, made.advantages), AlgorithmConfig(kl=KlConfig(coef=0.01)))
