"""Group advantages against their definitions and hand values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_rl.algorithms.advantages import compute_advantages, group_mean, group_mean_std, leave_one_out, median_mad
from mcore_rl.algorithms.group_stats import group_statistics
from mcore_rl.config.schema import Baseline


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def advantages(rewards, prompt_ids, baseline=Baseline.group_mean_std, ddof=1):
    return compute_advantages(rewards, prompt_ids, [f"s{i}" for i in range(len(rewards))], baseline=baseline, ddof=ddof)


def test_mean_std_hand_values():
    # mean 1/2, sample std sqrt(1/3), population std 1/2
    expected = f64(1, -1, -1, 1)
    torch.testing.assert_close(group_mean_std(f64(1, 0, 0, 1), ddof=1), expected * 0.866024, rtol=0, atol=1e-6)
    torch.testing.assert_close(group_mean_std(f64(1, 0, 0, 1), ddof=0), expected * 0.999998, rtol=0, atol=1e-9)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.4, 0.1, 0.7])
@pytest.mark.parametrize("size", [1, 3, 7, 8])
@pytest.mark.parametrize("baseline", [baseline for baseline in Baseline if baseline is not Baseline.none])
def test_equal_rewards_give_exactly_zero(value, size, baseline):
    fp32 = float(torch.tensor(value, dtype=torch.float32))
    result = advantages([fp32] * size, ["p"] * size, baseline)
    assert result.values.tolist() == [0.0] * size
    assert result.zero_variance_groups == 1 and result.singleton_groups == int(size == 1)


def test_mean_only_and_leave_one_out_hand_values():
    one_of_eight = f64(1, 0, 0, 0, 0, 0, 0, 0)
    torch.testing.assert_close(group_mean(one_of_eight), f64(0.875, *[-0.125] * 7))
    torch.testing.assert_close(leave_one_out(one_of_eight), f64(1.0, *[-1 / 7] * 7))
    torch.testing.assert_close(leave_one_out(f64(1, 0, 0, 0)), f64(1, -1 / 3, -1 / 3, -1 / 3))


def test_median_and_mad_hand_values():
    # median 2, deviations 2 1 0 1 8 with median 1; an even group: median 1/2, deviations 1/2
    expected = f64(-2, -1, 0, 1, 8) / 1.4826
    torch.testing.assert_close(median_mad(f64(0, 1, 2, 3, 10), ddof=1), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(median_mad(f64(0, 1), ddof=1), f64(-0.5, 0.5) / (1.4826 * 0.5), rtol=0, atol=2e-6)
    # more than half are equal: the median deviation is 0, the standard deviation (1/2) stands in
    torch.testing.assert_close(median_mad(f64(1, 0, 0, 0), ddof=1), f64(2, 0, 0, 0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("rewards", [[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1e-3], [1, 0, 0, 0, 0, 0, 0, 0]])
def test_one_odd_reward_never_explodes(baseline, rewards):
    values = advantages(rewards, ["p"] * len(rewards), baseline).values
    assert values.isfinite().all() and values.abs().max() <= 10


@given(st.lists(st.floats(-10, 10), min_size=2, max_size=12))
def test_leave_one_out_is_a_rescaled_mean_baseline(rewards):
    values = torch.tensor(rewards, dtype=torch.float64)
    size = len(rewards)
    torch.testing.assert_close(leave_one_out(values), group_mean(values) * size / (size - 1), rtol=1e-9, atol=1e-9)


@given(st.permutations(list(range(12))))
def test_groups_go_by_prompt_id_not_position(order):
    rewards = [1, 0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0]
    prompts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4
    straight = advantages(rewards, prompts).values
    shuffled = advantages([rewards[i] for i in order], [prompts[i] for i in order]).values
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=0, atol=1e-7)


def test_uneven_groups():
    result = advantages([1.0, 0.0, 5.0], ["a", "a", "b"], Baseline.group_mean)
    assert result.values.tolist() == [0.5, -0.5, 0.0]
    assert (result.groups, result.zero_variance_groups, result.singleton_groups) == (2, 1, 1)


def test_no_baseline_keeps_the_reward():
    assert advantages([1.0, 0.0, 5.0], ["a", "a", "b"], Baseline.none).values.tolist() == [1.0, 0.0, 5.0]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf])
def test_bad_reward_names_the_sample(bad):
    with pytest.raises(ValueError, match="sample s1: reward is"):
        advantages([1.0, bad], ["a", "a"])


def test_bad_ddof():
    with pytest.raises(ValueError, match="ddof=2"):
        group_mean_std(f64(0, 1), ddof=2)


def stats(rewards, correct, prompts):
    return group_statistics(rewards, correct, prompts, [f"s{i}" for i in range(len(rewards))])


def test_group_statistics_bucket_on_the_verdict():
    all_wrong = stats([-1.0] * 4, [False] * 4, ["a", "a", "b", "b"])
    assert (all_wrong["all_wrong_frac"], all_wrong["all_right_frac"], all_wrong["zero_var_frac"]) == (1.0, 0.0, 1.0)
    assert math.isnan(all_wrong["reward_mean_mixed"]) and all_wrong["reward_std"] == 0.0
    mixed = stats([1.0, 0.0, 0.0, 1.0], [True, False, False, True], ["a", "a", "b", "b"])
    assert (mixed["zero_var_frac"], mixed["all_wrong_frac"], mixed["all_right_frac"]) == (0.0, 0.0, 0.0)
    assert mixed["reward_mean"] == mixed["reward_mean_mixed"] == mixed["accuracy"] == mixed["reward_std"] == 0.5


def test_group_statistics_over_mixed_groups_only():
    values = stats([0, 0, 0, 0, 1, 1, 1, 0], [False] * 4 + [True, True, True, False], ["a", "a", "b", "b", "c", "c", "d", "d"])
    assert values["zero_var_frac"] == 0.75 and values["all_wrong_frac"] == 0.5 and values["all_right_frac"] == 0.25
    assert values["reward_mean_mixed"] == 0.5 and values["reward_mean"] == 0.375
    assert values["reward_group_std"] == 0.125


def test_graded_rewards_of_one_verdict_are_not_zero_variance():
    values = stats([0.1, 0.4], [False, False], ["a", "a"])
    assert values["zero_var_frac"] == 0.0 and values["all_wrong_frac"] == 1.0
