"""Policy losses: worked values, gradients against a few-line float64 reference, and invariances."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.aggregate import token_weights
from mcore_rl.algorithms.clip import clipped_objective
from mcore_rl.algorithms.loss_stats import LossStats
from mcore_rl.algorithms.losses import LossInputs, policy_loss, sft_loss
from mcore_rl.algorithms.ratio import masked_log_ratio, sequence_ratio, token_ratio
from mcore_rl.config.algorithm import Aggregation, AlgorithmConfig, RatioLevel

GSPO = {"low": 3e-4, "high": 4e-4}
WIDE = {"allow_wide_sequence_clip": True, "allow_narrow_token_clip": True}


def at_level(level):
    """The two-sided policy loss at a ratio level, as a function of the row and its bounds."""

    def loss(inputs, *, low, high):
        config = AlgorithmConfig(ratio_level=level, clip_low=low, clip_high=high, aggregation=MEAN, **WIDE)
        return policy_loss(config)(inputs)

    return loss


MEAN = Aggregation.seq_mean_token_mean
token_policy_loss, sequence_policy_loss, gspo_token_loss = LOSSES = [at_level(level) for level in RatioLevel]


def row(lengths, advantages, current, old=None, mask=None):
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return LossInputs(
        current=current,
        old=old,
        mask=torch.ones(sum(lengths), dtype=torch.bool) if mask is None else mask,
        segment_of_token=segment,
        advantages=torch.tensor(advantages, dtype=current.dtype),
    )


def gspo_reference(currents, olds, advantages, low, high):
    """Mean over sequences of -min(s A, clip(s) A), one sequence at a time, float64."""
    total = 0.0
    for current, old, advantage in zip(currents, olds, advantages, strict=True):
        s = torch.exp((current - old).sum() / len(current))
        total = total - torch.min(s * advantage, torch.clamp(s, 1 - low, 1 + high) * advantage)
    return total / len(currents)


def grpo_reference(currents, olds, advantages, low, high):
    total = 0.0
    for current, old, advantage in zip(currents, olds, advantages, strict=True):
        r = torch.exp(current - old)
        total = total - torch.min(r * advantage, torch.clamp(r, 1 - low, 1 + high) * advantage).sum() / len(current)
    return total / len(currents)


def test_clip_respects_the_sign_of_the_advantage():
    ratio, advantage = torch.tensor([1.0005, 1.0005]).double(), torch.tensor([1.0, -1.0]).double()
    loss, clipped = clipped_objective(ratio, advantage, **GSPO)
    torch.testing.assert_close(loss, torch.tensor([-1.0004, 1.0005]).double(), rtol=0, atol=1e-7)
    assert clipped.tolist() == [True, False]


def test_sequence_loss_is_a_mean_over_sequences_not_tokens():
    # lengths 2 and 8, mean log-ratios 5e-4 and 1e-4, A = +1, -1: (-1.0004 + 1.0001) / 2
    current = torch.cat([torch.full((2,), 5e-4), torch.full((8,), 1e-4)]).double().requires_grad_()
    inputs = row([2, 8], [1.0, -1.0], current, old=torch.zeros(10).double())
    loss = sequence_policy_loss(inputs, **GSPO)
    weights = torch.cat(token_weights([torch.ones(2), torch.ones(8)], Aggregation.seq_mean_token_mean).weights).double()
    total = (loss.values * weights).sum()
    assert total.item() == pytest.approx(-1.5e-4, abs=1e-7)
    total.backward()
    assert current.grad[:2].tolist() == [0.0, 0.0]
    torch.testing.assert_close(current.grad[2:], torch.full((8,), math.exp(1e-4) / 16).double(), rtol=1e-6, atol=0)
    assert loss.stats.metrics()["clip_frac"] == 0.5


@pytest.mark.parametrize(
    ("loss", "reference", "bounds"),
    [
        (sequence_policy_loss, gspo_reference, GSPO),
        (gspo_token_loss, gspo_reference, GSPO),
        (token_policy_loss, grpo_reference, {"low": 0.2, "high": 0.28}),
    ],
)
def test_value_and_gradient_equal_the_reference(loss, reference, bounds):
    torch.manual_seed(0)
    lengths, advantages = [1, 2, 3, 5, 8, 13, 21, 34], [1.0, -1.0, 0.5, -0.5, 0.0, 2.0, -2.0, 1.5]
    scale = 0.3 if loss is token_policy_loss else 2e-3
    olds = [-torch.rand(n).double() * 3 for n in lengths]
    currents = [(old + scale * torch.randn(len(old)).double()).requires_grad_() for old in olds]
    expected = reference(currents, olds, advantages, bounds["low"], bounds["high"])
    expected_grads = torch.autograd.grad(expected, currents)
    inputs = row(lengths, advantages, torch.cat(currents), torch.cat(olds))
    masks = [torch.ones(n, dtype=torch.bool) for n in lengths]
    weights = torch.cat(token_weights(masks, Aggregation.seq_mean_token_mean).weights).double()
    result = loss(inputs, **bounds)
    total = (result.values * weights).sum()
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-9)
    for ours, theirs in zip(torch.autograd.grad(total, currents), expected_grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-9)
    assert 0.0 < result.stats.metrics()["clip_frac"] < 1.0


def test_sequence_ratio_of_one_token_is_the_token_ratio():
    log_ratio = torch.tensor([0.3, -0.2, 0.01])
    mask, segment = torch.ones(3, dtype=torch.bool), torch.arange(3)
    assert torch.equal(sequence_ratio(log_ratio, mask, segment, 3), token_ratio(log_ratio))


def test_one_outlier_in_a_long_sequence():
    log_ratio = torch.zeros(500)
    log_ratio[17] = math.log(18.3)
    ratio = sequence_ratio(log_ratio, torch.ones(500, dtype=torch.bool), torch.zeros(500, dtype=torch.int64), 1)
    assert float(ratio) == pytest.approx(1.0058, abs=5e-5)
    loss, clipped = clipped_objective(ratio, torch.ones(1), **GSPO)
    assert bool(clipped) and float(loss) == pytest.approx(-1.0004, abs=1e-6)


def test_same_policy_gives_exactly_one_and_a_gradient_everywhere():
    current = (-torch.rand(9)).requires_grad_()
    for old in (None, current.detach().clone()):
        for loss in LOSSES:
            result = loss(row([4, 5], [1.0, -2.0], current, old), low=3e-4, high=4e-4)
            stats = result.stats.metrics()
            assert stats["ratio_min"] == stats["ratio_mean"] == stats["ratio_max"] == 1.0 and stats["clip_frac"] == 0.0
            (grad,) = torch.autograd.grad(result.values.sum(), current)
            torch.testing.assert_close(grad, torch.tensor([-1.0] * 4 + [2.0] * 5))


def test_clip_scale_of_the_three_ratios():
    # T=500, token log-ratio N(0, .05): the mean has std .00224, the sum 1.118
    torch.manual_seed(0)
    samples, length = 2000, 500
    log_ratio = 0.05 * torch.randn(samples * length)
    segment = torch.arange(samples).repeat_interleave(length)
    normalised = sequence_ratio(log_ratio, torch.ones(samples * length, dtype=torch.bool), segment, samples)
    raw = log_ratio.view(samples, length).sum(1).exp()
    outside = [((r > 1 + band) | (r < 1 - band)).float().mean().item() for r, band in ((normalised, 0.2), (raw, 0.2))]
    assert outside[0] == 0.0 and outside[1] == pytest.approx(0.85, abs=0.03)
    assert ((normalised - 1).abs() > 3e-4).float().mean().item() == pytest.approx(0.89, abs=0.03)
    advantage = torch.where(torch.rand(samples) < 0.5, 1.0, -1.0)
    clipped = clipped_objective(normalised, advantage, low=3e-4, high=3e-4)[1].float().mean().item()
    assert clipped == pytest.approx(0.445, abs=0.03)


@pytest.mark.parametrize("poison", [1e4, -1e4, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("loss", LOSSES)
def test_masked_values_change_nothing(poison, loss):
    mask = torch.tensor([False, True, True, False, True, False])
    clean = -torch.rand(6)
    results = []
    for fill in (0.0, poison):
        current = torch.where(mask, clean, fill).requires_grad_()
        old = torch.where(mask, clean - 0.001, fill)
        result = loss(row([3, 3], [1.0, -1.0], current, old, mask), low=0.2, high=0.2)
        (grad,) = torch.autograd.grad(result.values.sum(), current)
        results.append((result.values.detach(), grad, result.stats))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]
    assert results[0][1][~mask].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("log_ratio", [200.0, -200.0])
def test_huge_log_ratios_stay_finite(loss, log_ratio):
    current = torch.full((3,), log_ratio).requires_grad_()
    result = loss(row([1, 1, 1], [0.0, 1.0, -1.0], current, torch.zeros(3)), low=0.2, high=0.2)
    (grad,) = torch.autograd.grad(result.values.sum(), current)
    assert result.values.isfinite().all() and grad.isfinite().all() and result.values[0] == 0.0


@pytest.mark.parametrize("loss", LOSSES)
def test_nan_at_a_trained_token_is_not_hidden(loss):
    current = torch.tensor([-1.0, math.nan])
    assert loss(row([2], [1.0], current, torch.zeros(2)), low=0.2, high=0.2).values.isnan().any()


def test_ratio_inside_the_clamp_is_unchanged():
    log_ratio = torch.linspace(-20, 20, 401)
    assert torch.equal(token_ratio(log_ratio), log_ratio.exp())


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=8), st.integers(0, 10_000))
def test_a_packed_row_equals_its_sequences_alone(lengths, seed):
    torch.manual_seed(seed)
    old = -torch.rand(sum(lengths)).double()
    current = old + 4e-4 * torch.randn(sum(lengths)).double()
    advantages = torch.randn(len(lengths)).double().tolist()
    together = sequence_policy_loss(row(lengths, advantages, current, old), **GSPO)
    alone, stats, start = [], LossStats(), 0
    for length, advantage in zip(lengths, advantages, strict=True):
        cut = slice(start, start + length)
        one = sequence_policy_loss(row([length], [advantage], current[cut], old[cut]), **GSPO)
        alone.append(one.values)
        stats = stats.merge(one.stats)
        start += length
    torch.testing.assert_close(together.values, torch.cat(alone), rtol=0, atol=1e-12)
    for key, value in together.stats.metrics().items():
        assert value == pytest.approx(stats.metrics()[key], rel=1e-12, nan_ok=True)


def test_sequence_without_trained_tokens_is_no_unit():
    mask = torch.tensor([True, False])
    result = sequence_policy_loss(row([1, 1], [1.0, 1.0], torch.zeros(2), torch.ones(2), mask), **GSPO)
    assert (result.stats.count, result.stats.active, result.values[1].item()) == (1.0, 1.0, 0.0)
    empty = LossStats().metrics()
    assert all(math.isnan(value) for name, value in empty.items() if name not in ("pg_positive_adv", "pg_negative_adv"))


def test_zero_advantage_does_not_count_as_clippable():
    result = sequence_policy_loss(row([1, 1], [0.0, 1.0], torch.tensor([0.1, 0.1]), torch.zeros(2)), **GSPO)
    assert result.stats.metrics()["clip_frac"] == 1.0 and result.stats.active == 1.0


def test_sft_loss_is_the_negative_log_likelihood():
    current = torch.tensor([math.nan, -0.5, -0.25]).requires_grad_()
    result = sft_loss(row([3], [0.0], current, None, torch.tensor([False, True, True])))
    assert result.values.tolist() == [0.0, 0.5, 0.25]
    (grad,) = torch.autograd.grad(result.values.sum(), current)
    assert grad.tolist() == [0.0, -1.0, -1.0]


def test_old_none_is_the_detached_current():
    current, mask = torch.tensor([-1.0, -2.0]).requires_grad_(), torch.tensor([True, True])
    log_ratio = masked_log_ratio(current, None, mask)
    assert log_ratio.tolist() == [0.0, 0.0] and log_ratio.requires_grad
