"""Rollout correction: worked values for every combination, law of equal engines, what is dropped leaves the denominators."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.correction import correct
from mcore_rl.algorithms.losses import LossInputs, policy_loss
from mcore_rl.config.algorithm import (
    Aggregation,
    AlgorithmConfig,
    CorrectionConfig,
    Denominator,
    RatioLevel,
    SequenceCorrection,
    TokenCorrection,
)
from mcore_rl.types import StopRun, TokenBatch, TrainBatch
from mcore_rl.update_terms import with_correction

LN2 = math.log(2.0)
# weights 1, 4, 1/4 in one response (sum of delta 0) and 1, 1 in another
DELTA = [torch.tensor([0.0, 2 * LN2, -2 * LN2]), torch.tensor([0.0, 0.0])]
ON = {"enabled": True, "sequence": SequenceCorrection.none}


def corrected(delta, masks=None, **changes):
    sampler = [-torch.ones(len(one)) for one in delta]
    old = [one + two for one, two in zip(sampler, delta, strict=True)]
    masks = masks or [torch.ones(len(one), dtype=torch.bool) for one in delta]
    return correct(old, sampler, masks, CorrectionConfig(**{**ON, **changes}))


@pytest.mark.parametrize(
    ("denominator", "token", "scale", "kept"),
    [
        (Denominator.trainer, TokenCorrection.truncate, [1.0, 2.0, 0.25], [True, True, True]),
        (Denominator.trainer, TokenCorrection.mask, [1.0, 4.0, 0.25], [True, False, False]),
        (Denominator.trainer, TokenCorrection.none, [1.0, 1.0, 1.0], [True, True, True]),
        (Denominator.sampler, TokenCorrection.truncate, [1.0, 0.5, 1.0], [True, True, True]),
        (Denominator.sampler, TokenCorrection.mask, [1.0, 1.0, 1.0], [True, False, False]),
        (Denominator.sampler, TokenCorrection.none, [1.0, 1.0, 1.0], [True, True, True]),
    ],
)
def test_factors_by_hand(denominator, token, scale, kept):
    found = corrected(DELTA, denominator=denominator, token=token)
    torch.testing.assert_close(found.scale[0], torch.tensor(scale))
    assert found.keep[0].tolist() == kept
    assert found.scale[1].tolist() == [1.0, 1.0] and found.keep[1].tolist() == [True, True]


def test_what_a_sequence_ratio_carries():
    """e^(mean delta) of the kept tokens: two that cancel weigh 1 each; a dropped one takes no part."""
    gaps, masks = [torch.tensor([0.6, -0.6]), torch.tensor([0.1, 3.0])], [torch.ones(2, dtype=torch.bool)] * 2
    settings = CorrectionConfig(enabled=True, token=TokenCorrection.mask, sequence=SequenceCorrection.none)
    settings.token_floor = 0.1
    found = correct(gaps, [torch.zeros(2)] * 2, masks, settings, sequence_ratio=True)
    assert [kept.tolist() for kept in found.keep] == [[True, True], [True, False]]
    carried = (1.0, 1.0, math.exp(0.1), 0.0)
    share = sum(carried) ** 2 / (4 * sum(one**2 for one in carried))
    assert found.metrics["correction/ess_frac"] == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("denominator", list(Denominator))
def test_both_denominators_weigh_a_token_alike_at_the_sampling_weights(denominator):
    """One REINFORCE step: d loss / d logp = -min(w, cap) A whatever stands under the ratio."""
    found = corrected(DELTA, denominator=denominator)
    current = (DELTA[0] - 1.0).requires_grad_()
    old = torch.full((3,), -1.0) if denominator is Denominator.sampler else current.detach()
    config = AlgorithmConfig(aggregation=Aggregation.token_mean, ratio_level=RatioLevel.token, clip_low=0.9, clip_high=9.0)
    row = LossInputs(current, old, torch.ones(3).bool(), torch.zeros(3).long(), torch.ones(1), scale=found.scale[0])
    (grad,) = torch.autograd.grad(policy_loss(config)(row).values.sum(), current)
    torch.testing.assert_close(grad, -torch.tensor([1.0, 2.0, 0.25]))


def test_effective_sample_size_and_counts_by_hand():
    # effective weights 1, 2, 1/4, 1, 1: sum 5.25, squares 7.0625 -> 27.5625 / (5 x 7.0625)
    for denominator in Denominator:
        metrics = corrected(DELTA, denominator=denominator).metrics
        assert metrics["correction/ess_frac"] == pytest.approx(27.5625 / 35.3125, rel=1e-6)
        assert metrics["correction/token_beyond_frac"] == 0.2 and metrics["correction/rejected_frac"] == 0.0
        assert (metrics["correction/weight_mean"], metrics["correction/weight_max"]) == pytest.approx((7.25 / 5, 4.0))
    masked = corrected(DELTA, token=TokenCorrection.mask).metrics
    assert masked["correction/token_beyond_frac"] == 0.4 and masked["correction/kept_token_frac"] == 0.6
    assert masked["correction/ess_frac"] == pytest.approx(0.6)


def test_rejection_on_the_sum_and_on_the_mean():
    delta = [torch.tensor([0.3, 0.3, 0.3]), torch.tensor([-0.8]), torch.tensor([0.5, -0.5])]
    by_sum = corrected(delta, sequence=SequenceCorrection.sum, sequence_max_nats=0.7)
    assert [bool(keep.all()) for keep in by_sum.keep] == [False, False, True]
    by_mean = corrected(delta, sequence=SequenceCorrection.mean, sequence_max_nats=0.4)
    assert [bool(keep.all()) for keep in by_mean.keep] == [True, False, True]
    assert by_sum.metrics["correction/rejected_frac"] == pytest.approx(2 / 3)
    assert by_sum.metrics["correction/delta_seq_max_abs_nats"] == pytest.approx(0.9)
    assert by_sum.metrics["correction/delta_seq_mean_abs_nats"] == pytest.approx(1.7 / 3)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 1000))
def test_equal_engines_change_nothing(lengths, seed):
    """Factor exactly 1, nothing dropped, whatever the combination."""
    torch.manual_seed(seed)
    logprobs = [-3 * torch.rand(n) for n in lengths]
    masks = [torch.rand(n) < 0.7 for n in lengths]
    masks[0][0] = True
    for denominator in Denominator:
        for token in TokenCorrection:
            for sequence in SequenceCorrection:
                config = CorrectionConfig(True, denominator, token, sequence=sequence, sequence_max_nats=1e-3)
                found = correct(logprobs, logprobs, masks, config)
                assert all(bool((scale == 1.0).all()) for scale in found.scale)
                assert all(torch.equal(keep, mask) for keep, mask in zip(found.keep, masks, strict=True))
                assert found.metrics["correction/ess_frac"] == pytest.approx(1.0, abs=1e-12)


def test_untrained_positions_do_not_matter_and_trained_ones_must_be_finite():
    mask = [torch.tensor([False, True, True])]
    clean = corrected([torch.tensor([0.0, 0.1, 0.2])], mask)
    for poison in (math.nan, math.inf, -1e4):
        found = corrected([torch.tensor([poison, 0.1, 0.2])], mask)
        assert torch.equal(found.scale[0], clean.scale[0]) and found.metrics == clean.metrics
    with pytest.raises(ValueError, match="1 of 2 trained tokens"):
        corrected([torch.tensor([0.0, math.nan, 0.2])], mask)


def update(delta):
    tokens = TokenBatch(
        tuple(torch.arange(len(one)) for one in delta),
        tuple(torch.arange(len(one)) > 0 for one in delta),
        tuple(f"p/{i}" for i in range(len(delta))),
    )
    sampler = tuple(-torch.ones(len(one)) for one in delta)
    old = tuple(one + two for one, two in zip(sampler, delta, strict=True))
    weights = tuple(mask.float() for mask in tokens.loss_mask)
    return TrainBatch(tokens, weights, torch.ones(len(delta)), old_logprobs=old, sampler_logprobs=sampler)


def test_a_rejected_response_leaves_numerator_and_denominator():
    config = AlgorithmConfig(aggregation=Aggregation.seq_mean_token_mean, correction=CorrectionConfig(enabled=True))
    made = with_correction(update([torch.tensor([9.0, 0.0, 0.1]), torch.tensor([9.0, 0.9]), torch.tensor([9.0, 0.0])]), config)
    assert [weights.tolist() for weights in made.token_weights] == [[0.0, 0.25, 0.25], [0.0, 0.0], [0.0, 0.5]]
    assert made.ratio_from_sampler and made.token_fields()["old"] is made.sampler_logprobs
    assert made.facts["correction/rejected_frac"] == pytest.approx(1 / 3)
    trainer = AlgorithmConfig(
        aggregation=Aggregation.token_mean, correction=CorrectionConfig(enabled=True, denominator=Denominator.trainer)
    )
    recomputed = with_correction(update([torch.tensor([0.0, 0.0])]), trainer)
    assert not recomputed.ratio_from_sampler and recomputed.token_fields()["old"] is recomputed.old_logprobs
    assert with_correction(made, AlgorithmConfig()) is made


def test_nothing_left_stops_the_run():
    config = AlgorithmConfig(aggregation=Aggregation.token_mean, correction=CorrectionConfig(enabled=True))
    with pytest.raises(StopRun, match=r"rejects every response.*0\.9 nats"):
        with_correction(update([torch.tensor([0.0, 0.9])]), config)


def test_a_lost_sampler_is_an_error():
    batch = update([torch.tensor([0.0, 0.0])])
    lost = TrainBatch(batch.tokens, batch.token_weights, batch.advantages, batch.old_logprobs, ratio_from_sampler=True)
    with pytest.raises(ValueError, match="no sampler log-probs"):
        lost.token_fields()
