"""Token weights: hand sums, and no dependence on how a batch is cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.algorithms.aggregate import token_weights
from mcore_rl.config.schema import Aggregation


def masks(*lengths):
    return [torch.ones(n, dtype=torch.bool) for n in lengths]


@pytest.mark.parametrize(
    ("mode", "per_token", "total"),
    [
        (Aggregation.token_mean, [1 / 61, 1 / 61, 1 / 61], 1.0),
        (Aggregation.seq_mean_token_mean, [1 / 120, 1 / 36, 1 / 27], 1.0),
        (Aggregation.seq_mean_token_sum, [1 / 3, 1 / 3, 1 / 3], 61 / 3),
        (Aggregation.seq_mean_token_sum_norm, [1 / 150, 1 / 150, 1 / 150], 61 / 150),
    ],
)
def test_four_modes_by_hand(mode, per_token, total):
    result = token_weights(masks(40, 12, 9), mode, length_norm_tokens=50)
    for weights, expected in zip(result.weights, per_token, strict=True):
        torch.testing.assert_close(weights, torch.full_like(weights, expected))
    assert sum(float(w.double().sum()) for w in result.weights) == pytest.approx(total, rel=1e-6)
    assert result.trained_tokens == 61 and result.zero_token_sequences == 0


@pytest.mark.parametrize("mode", list(Aggregation))
def test_untrained_tokens_and_sequences_weigh_nothing(mode):
    some = [torch.tensor([False, True, True, False]), torch.tensor([False, False])]
    result = token_weights(some, mode, length_norm_tokens=2)
    alone = token_weights(some[:1], mode, length_norm_tokens=2)
    assert torch.equal(result.weights[0], alone.weights[0])
    assert result.weights[0][[0, 3]].tolist() == [0.0, 0.0] and result.weights[1].tolist() == [0.0, 0.0]
    assert result.zero_token_sequences == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any), st.randoms(use_true_random=False), st.integers(1, 5))
def test_split_invariance(lengths, rng, cuts):
    losses = [torch.tensor([rng.uniform(-1, 1) for _ in range(n)], dtype=torch.float64) for n in lengths]
    weights = token_weights(masks(*lengths), Aggregation.seq_mean_token_mean).weights
    parts = [0.0] * cuts
    for loss, weight in zip(losses, weights, strict=True):
        parts[rng.randrange(cuts)] += float((loss * weight.double()).sum())
    expected = sum(float(loss.mean()) for loss in losses if len(loss)) / sum(n > 0 for n in lengths)
    assert sum(parts) == pytest.approx(expected, abs=1e-6)


def test_refusals():
    with pytest.raises(ValueError, match=r"algorithm\.aggregation is not set"):
        token_weights(masks(3), None)
    with pytest.raises(ValueError, match="no token is trained"):
        token_weights([torch.zeros(3, dtype=torch.bool)], Aggregation.token_mean)
    with pytest.raises(ValueError, match="length_norm_tokens=None"):
        token_weights(masks(3), Aggregation.seq_mean_token_sum_norm)
