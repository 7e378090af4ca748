"""Trainer-minus-sampler statistics, by hand."""

import math

import pytest
import torch

from mcore_rl.telemetry.mismatch import delta_statistics, outside_clip_frac


def test_only_trained_tokens_count():
    old = (torch.tensor([9.0, -1.0, -2.0]), torch.tensor([9.0, -4.0]))
    sampler = (torch.tensor([0.0, -1.5, -2.0]), torch.tensor([0.0, -3.0]))
    mask = (torch.tensor([False, True, True]), torch.tensor([False, True]))
    found = delta_statistics(old, sampler, mask)  # deltas 0.5, 0, -1
    assert found["delta_mean_nats"] == pytest.approx(-0.5 / 3)
    assert found["delta_mean_abs_nats"] == pytest.approx(0.5)
    assert found["delta_max_abs_nats"] == 1.0
    assert found["delta_seq_mean_abs_nats"] == pytest.approx(0.75)
    assert found["delta_seq_max_abs_nats"] == 1.0
    weights = [math.exp(0.5), 1.0, math.exp(-1.0)]
    assert found["mismatch_ess_frac"] == pytest.approx(sum(weights) ** 2 / (3 * sum(w * w for w in weights)))
    weights = [math.exp(0.5), math.exp(-1.0)]
    assert found["mismatch_ess_seq_frac"] == pytest.approx(sum(weights) ** 2 / (2 * sum(w * w for w in weights)))
    assert found["delta_p99_nats"] == pytest.approx(0.99)  # linear between 0.5 and 1 at rank 1.98 of 0..2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_stops_the_run(value):
    with pytest.raises(ValueError, match=r"1 of 1 .* not finite"):
        delta_statistics((torch.tensor([0.0, value]),), (torch.zeros(2),), (torch.tensor([False, True]),))


def test_nothing_trained_is_an_error():
    with pytest.raises(ValueError, match="no trained token"):
        delta_statistics((torch.zeros(2),), (torch.zeros(2),), (torch.zeros(2, dtype=torch.bool),))


def test_share_of_ratios_that_the_mismatch_alone_would_clip():
    """Per token e^.1, e^0, e^-.3; per sequence e^.05 and e^-.3."""
    old = (torch.tensor([0.0, 0.1, 0.0]), torch.tensor([0.0, -0.3]))
    sampler = (torch.zeros(3), torch.zeros(2))
    mask = (torch.tensor([False, True, True]), torch.tensor([False, True]))
    assert outside_clip_frac(old, sampler, mask, (0.2, 0.2), per_sequence=False) == pytest.approx(1 / 3)
    assert outside_clip_frac(old, sampler, mask, (0.2, 0.1), per_sequence=False) == pytest.approx(2 / 3)
    assert outside_clip_frac(old, sampler, mask, (0.3, 0.06), per_sequence=True) == 0.0
    assert outside_clip_frac(old, sampler, mask, (0.2, 0.05), per_sequence=True) == 1.0
