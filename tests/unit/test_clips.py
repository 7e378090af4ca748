"""Dual clip, CISPO, SAPO, entropy bonus and factors: worked values, and gradients against float64 references of a few lines."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.clip import cispo_objective, dual_clipped_objective, sapo_objective
from mcore_rl.algorithms.losses import LossInputs, policy_loss
from mcore_rl.config.algorithm import Aggregation, AlgorithmConfig, Clip, KlConfig, KlEstimator, KlPlacement, RatioLevel

LENGTHS, ADVANTAGES = [1, 2, 3, 5, 8, 13], [1.0, -1.0, 0.5, -0.5, 0.0, 2.0]


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_dual_clip_by_hand():
    # ratio 10, c = 3, eps .2: A = -1 -> 3, A = +1 -> -1.2; ratio .1: A = -1 -> .8, A = +1 -> -.1
    ratio, advantage = f64(10, 10, 0.1, 0.1), f64(-1, 1, -1, 1)
    loss, cut = dual_clipped_objective(ratio, advantage, low=0.2, high=0.2, floor=3.0)
    torch.testing.assert_close(loss, f64(3, -1.2, 0.8, -0.1))
    assert cut.tolist() == [True, True, True, False]


def test_cispo_by_hand():
    # weights 5 (cut at 1 + 4), 2 and 0.5 (free below); the loss is -weight A logp and its gradient -weight A
    logprob = f64(-1, -2, -3).requires_grad_()
    loss, cut = cispo_objective(f64(9, 2, 0.5), f64(1, 1, -1), logprob, low=1.0, high=4.0)
    torch.testing.assert_close(loss.detach(), f64(5, 4, -1.5))
    (grad,) = torch.autograd.grad(loss.sum(), logprob)
    assert grad.tolist() == [-5.0, -2.0, 0.5] and cut.tolist() == [True, False, False]


def test_sapo_by_hand():
    # at r = 1: sigmoid(0) = 1/2, so the loss is -2 A / tau and its gradient in r is -A whatever tau
    ratio = f64(1, 1).requires_grad_()
    loss, cut = sapo_objective(ratio, f64(1, -1), positive=1.0, negative=2.0)
    torch.testing.assert_close(loss.detach(), f64(-2, 1))
    (grad,) = torch.autograd.grad(loss.sum(), ratio)
    torch.testing.assert_close(grad, f64(-1, 1))
    # r = 2, tau = 1: weight 4 p (1 - p) with p = sigmoid(1) = .7310586, so .7864477
    ratio = f64(2).requires_grad_()
    (grad,) = torch.autograd.grad(sapo_objective(ratio, f64(1), positive=1.0, negative=1.0)[0].sum(), ratio)
    assert float(grad) == pytest.approx(-0.7864477, abs=1e-6) and not cut.any()


def reference(config, row, advantage):
    """One sequence, float64, straight from the definitions; the losses of its tokens."""
    logp, old, ref, entropy, scale, shift = row
    ratio, a = torch.exp(logp - old), advantage + shift
    if config.ratio_level is not RatioLevel.token:
        s = torch.exp((logp - old).mean())
        ratio = s.detach() * torch.exp(logp - logp.detach()) if config.ratio_level is RatioLevel.sequence_token else s
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.clip is Clip.cispo:
        loss = -ratio.detach().clamp(low, high) * a * logp
    elif config.clip is Clip.sapo:
        tau = (a > 0) * config.sapo_temperature_positive + (a <= 0).double() * config.sapo_temperature_negative
        loss = -(4 / tau) / (1 + torch.exp(-tau * (ratio - 1))) * a
    else:
        loss = torch.max(-ratio * a, -ratio.clamp(low, high) * a)
        if config.clip is Clip.dual:
            loss = torch.where(a < 0, torch.min(loss, -config.dual_clip * a), loss)
    gap = logp - ref
    kl = {"k2": gap**2 / 2, "k3": torch.exp(-gap) - 1 + gap}[config.kl.estimator.value] * config.kl.coef
    return scale * loss + kl - config.entropy_coef * entropy


TOKEN = {"ratio_level": RatioLevel.token, "clip_low": 0.2, "clip_high": 0.28}
CONFIGS = {
    "two_sided": TOKEN,
    "dual": {**TOKEN, "clip": Clip.dual, "dual_clip": 1.5},
    "cispo": {**TOKEN, "clip": Clip.cispo, "clip_low": 1.0, "clip_high": 0.3},
    "sapo": {**TOKEN, "clip": Clip.sapo},
    "gspo": {},
    "gspo_token": {"ratio_level": RatioLevel.sequence_token},
}


@pytest.mark.parametrize("estimator", [KlEstimator.k2, KlEstimator.k3])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_every_term_against_the_definitions(changes, estimator):
    torch.manual_seed(1)
    kl = KlConfig(0.03, KlPlacement.loss, estimator)
    config = AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean, kl=kl, entropy_coef=0.02, **changes)
    spread = 0.4 if config.ratio_level is RatioLevel.token else 2e-3
    rows = []
    for length in LENGTHS:
        old = -3 * torch.rand(length).double()
        logp = (old + spread * torch.randn(length).double()).requires_grad_()
        shift = (
            0.1 * torch.randn(length).double() if config.ratio_level is not RatioLevel.sequence else torch.zeros(length).double()
        )
        rows.append(
            (logp, old, old + torch.randn(length) / 3, torch.rand(length).double().requires_grad_(), torch.rand(length), shift)
        )
    logps, olds, refs, entropies, scales, shifts = zip(*rows, strict=True)
    weights = [torch.rand(length).double() for length in LENGTHS]
    each = zip(rows, ADVANTAGES, weights, strict=True)
    expected = sum((reference(config, row, advantage) * weight).sum() for row, advantage, weight in each)
    leaves = [*logps, *entropies]
    expected_grads = torch.autograd.grad(expected, leaves)
    inputs = LossInputs(
        current=torch.cat(logps),
        old=torch.cat(olds),
        mask=torch.ones(sum(LENGTHS), dtype=torch.bool),
        segment_of_token=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        advantages=torch.tensor(ADVANTAGES).double(),
        weights=torch.cat(weights),
        entropy=torch.cat(entropies),
        scale=torch.cat(scales),
        advantage_shift=torch.cat(shifts),
        reference=torch.cat(refs),
    )
    result = policy_loss(config)(inputs)
    total = (result.values * inputs.weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(total, leaves), expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    gaps = torch.cat(logps).detach() - torch.cat(refs)
    assert result.stats.metrics()["kl_k1_nats"] == pytest.approx(float(gaps.mean()), rel=1e-6)


@pytest.mark.parametrize("poison", [1e4, -1e4, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS.keys())
def test_values_where_nothing_is_trained_change_nothing(changes, poison):
    """Log-probs, reference, entropy, factors and shifts at untrained tokens: loss and gradient bit for bit the same."""
    torch.manual_seed(2)
    kl = KlConfig(0.1, KlPlacement.loss, KlEstimator.k3)
    loss = policy_loss(AlgorithmConfig(aggregation=Aggregation.token_mean, kl=kl, entropy_coef=0.1, **changes))
    mask = torch.tensor([False, True, True, False, True, False])
    clean = [-torch.rand(6) for _ in range(6)]
    found = []
    for fill in (0.0, poison):
        current, old, reference, entropy, scale, shift = (torch.where(mask, values, fill) for values in clean)
        current.requires_grad_(), entropy.requires_grad_()
        result = loss(
            LossInputs(
                current,
                old,
                mask,
                torch.tensor([0, 0, 0, 1, 1, 1]),
                torch.tensor([1.0, -1.0]),
                weights=mask.float(),
                entropy=entropy,
                scale=scale,
                advantage_shift=shift,
                reference=reference,
            )
        )
        grads = torch.autograd.grad((result.values * mask).sum(), [current, entropy])
        found.append((result.values.detach(), *grads, result.stats))
    for one, other in zip(found[0][:3], found[1][:3], strict=True):
        assert torch.equal(one, other) and one[~mask].tolist() == [0.0, 0.0, 0.0] and one.isfinite().all()
    assert found[0][3] == found[1][3]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(0, 10_000), st.sampled_from(list(CONFIGS)))
def test_a_row_equals_its_sequences_alone(lengths, seed, name):
    torch.manual_seed(seed)
    loss = policy_loss(AlgorithmConfig(aggregation=Aggregation.token_mean, **CONFIGS[name]))
    old = -torch.rand(sum(lengths)).double()
    current = old + 0.05 * torch.randn(sum(lengths)).double()
    mask = torch.rand(sum(lengths)) < 0.8
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    advantages = torch.randn(len(lengths)).double()
    together = loss(LossInputs(current, old, mask, segment, advantages)).values
    for index in range(len(lengths)):
        own = segment == index
        alone = loss(
            LossInputs(current[own], old[own], mask[own], torch.zeros(lengths[index]).long(), advantages[index : index + 1])
        )
        torch.testing.assert_close(together[own], alone.values, rtol=0, atol=1e-12)


def test_skew_of_the_two_losses():
    # ratio 1: weighted losses -1 x .25 x 2 and +1 x .25 x 1 -> P = -.5, N = .25, skew (P + N) / (|P| + |N|) = -1/3
    config = AlgorithmConfig(aggregation=Aggregation.token_mean, **TOKEN)
    quarter = torch.full((4,), 0.25)
    inputs = LossInputs(
        -torch.rand(4), None, torch.ones(4).bool(), torch.tensor([0, 0, 1, 2]), torch.tensor([1.0, -1.0, 0.0]), weights=quarter
    )
    stats = policy_loss(config)(inputs).stats.metrics()
    assert (stats["pg_positive_adv"], stats["pg_negative_adv"]) == (-0.5, 0.25)
    assert stats["pg_skew"] == pytest.approx(-1 / 3) and stats["ratio_kl_nats"] == 0.0
    assert "kl_k1_nats" not in stats


def test_terms_without_their_inputs_are_errors():
    row = (torch.zeros(2), None, torch.ones(2).bool(), torch.zeros(2).long(), torch.ones(1))
    token = {"aggregation": Aggregation.token_mean, **TOKEN}
    with pytest.raises(ValueError, match=r"kl\.coef=0\.1: the batch carries no reference"):
        policy_loss(AlgorithmConfig(kl=KlConfig(0.1, KlPlacement.loss, KlEstimator.k2), **token))(LossInputs(*row))
    with pytest.raises(ValueError, match=r"entropy_coef=0\.1"):
        policy_loss(AlgorithmConfig(entropy_coef=0.1, **token))(LossInputs(*row))
