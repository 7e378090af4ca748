"""Clip-Cov: covariance and quota by hand, who may never be chosen, and a choice that no order or split can change."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl.algorithms.clip_cov import ClipCovInputs, choose_tokens
from mcore_rl.algorithms.keyed import token_uniforms
from mcore_rl.config.algorithm import Aggregation, AlgorithmConfig, ClipCovConfig, RatioLevel
from mcore_rl.types import TokenBatch, TrainBatch
from mcore_rl.update_terms import with_chosen_tokens


def config(fraction=0.25, low=1.0, high=5.0):
    return AlgorithmConfig(
        aggregation=Aggregation.token_mean,
        ratio_level=RatioLevel.token,
        clip_low=0.2,
        clip_high=0.2,
        clip_cov=ClipCovConfig(fraction, low, high),
    )


def inputs(current, advantages, *, old=None, masks=None, names=None, step=0):
    masks = masks or [torch.ones(len(one), dtype=torch.bool) for one in current]
    names = names or [f"p{i}/0" for i in range(len(current))]
    return ClipCovInputs(current, old, advantages, masks, names, seed=7, step=step)


def f(*values):
    return torch.tensor(values)


def test_covariance_bounds_and_quota_by_hand():
    # mean log-prob -2, mean advantage 0: covariances 1 x 1 = 1 (excluded), 1 x 2 = 2 (in), -1 x -3 = 3 (in),
    # -1 x 0 = 0, 1 x 0 = 0, -1 x 0 = 0; bounds are exclusive on both sides
    current, advantages = [f(-1, -1, -3), f(-3, -1, -3)], [f(1, 2, -3), f(0, 0, 0)]
    both = choose_tokens(inputs(current, advantages), config(fraction=0.34))
    assert [keep.tolist() for keep in both.keep] == [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    assert both.metrics == {
        "clip_cov/cov_mean": 1.0,
        "clip_cov/cov_max": 3.0,
        "clip_cov/n_eligible": 2.0,
        "clip_cov/n_selected": 2.0,
        "clip_cov/effective_ratio": pytest.approx(1 / 3),
        "clip_cov/sel_posA_frac": 0.5,
    }
    outside = choose_tokens(inputs(current, advantages), config(low=2.0, high=3.0))
    assert outside.metrics["clip_cov/n_eligible"] == 0.0 and math.isnan(outside.metrics["clip_cov/sel_posA_frac"])
    # quota max(int(fraction x 6), 1): int(.34 x 6) = 2 above, at least one below
    assert choose_tokens(inputs(current, advantages), config(fraction=1e-6)).metrics["clip_cov/n_selected"] == 1.0


def test_padding_and_clipped_tokens_are_never_chosen():
    current, advantages = [f(-1, -1, -3, 50)], [f(1, 2, -3, 99)]
    masks = [torch.tensor([True, True, True, False])]
    # ratio e^.5 with A > 0 is cut at 1.2; ratio e^.5 with A < 0 is not
    old = [f(-1.5, -1.5, -3.5, 0)]
    found = choose_tokens(inputs(current, advantages, old=old, masks=masks), config(fraction=0.9, low=0.1))
    assert found.keep[0].tolist() == [1.0, 1.0, 0.0, 1.0]


def batch(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    current = [-3 * torch.rand(n, generator=generator) for n in sizes]
    advantages = [torch.full((n,), float(torch.randn((), generator=generator) * 2)) for n in sizes]
    masks = [torch.rand(n, generator=generator) < 0.8 for n in sizes]
    masks[0][0] = True
    return current, advantages, masks, [f"p{i // 2}/{i % 2}" for i in range(len(sizes))]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=8), st.integers(0, 1000))
def test_the_order_of_the_batch_does_not_matter(sizes, seed):
    current, advantages, masks, names = batch(sizes, seed)
    order = list(range(len(sizes)))
    random.Random(seed).shuffle(order)
    straight = choose_tokens(inputs(current, advantages, masks=masks, names=names), config(fraction=0.1, low=0.05))
    pick = [[part[i] for i in order] for part in (current, advantages, masks, names)]
    turned = choose_tokens(inputs(pick[0], pick[1], masks=pick[2], names=pick[3]), config(fraction=0.1, low=0.05))
    assert all(torch.equal(turned.keep[place], straight.keep[index]) for place, index in enumerate(order))
    trained = sum(int(mask.sum()) for mask in masks)
    chosen = straight.metrics["clip_cov/n_selected"]
    assert chosen == min(max(int(0.1 * trained), 1), straight.metrics["clip_cov/n_eligible"])


def test_another_step_or_seed_draws_others():
    current, advantages, _, names = batch([50] * 8, 3)
    made = [choose_tokens(inputs(current, advantages, names=names, step=step), config(0.02, 0.05)) for step in (0, 0, 1)]
    chosen = [torch.cat(choice.keep) for choice in made]
    assert torch.equal(chosen[0], chosen[1]) and not torch.equal(chosen[0], chosen[2])
    assert not torch.equal(token_uniforms(0, 0, "a/0", 5), token_uniforms(1, 0, "a/0", 5))
    assert not torch.equal(token_uniforms(0, 0, "a/0", 5), token_uniforms(0, 0, "a/1", 5))
    assert torch.equal(token_uniforms(0, 0, "a/0", 5), token_uniforms(0, 0, "a/0", 9)[:5])


def test_low_entropy_can_only_choose_falling_tokens():
    """G = 8, one right answer: A = 2.475 / -.354. With logp - mean <= H < 1 / 2.475 no rising token reaches low = 1."""
    generator = torch.Generator().manual_seed(0)
    current = [-0.4 * torch.rand(200, generator=generator) for _ in range(8)]
    current[3][17] = -6.0
    advantages = [torch.full((200,), 2.475 if i == 0 else -0.354) for i in range(8)]
    found = choose_tokens(inputs(current, advantages), config(fraction=0.5))
    assert found.metrics["clip_cov/n_selected"] >= 1.0 and found.metrics["clip_cov/sel_posA_frac"] == 0.0
    assert found.keep[3][17] == 0.0


def test_chosen_tokens_lose_their_policy_term_only():
    ids = tuple(torch.arange(3) for _ in range(2))
    tokens = TokenBatch(ids, tuple(torch.tensor([False, True, True]) for _ in range(2)), ("p/0", "p/1"))
    weights = tuple(0.25 * mask.float() for mask in tokens.loss_mask)
    made = TrainBatch(tokens, weights, f(3.0, -3.0), scale=(f(1, 0.5, 0.5), f(1, 1, 1)))
    current = [f(0.0, -0.1, -4.0), f(0.0, -0.1, -4.0)]
    chosen = with_chosen_tokens(made, current, config(fraction=0.9), seed=0, step=0)
    # mean log-prob -2.05, mean advantage 0: covariances 3 x 1.95 and -3 x -1.95 = 5.85 lie above 5, the others below 0
    assert torch.equal(torch.cat(chosen.scale), torch.cat(made.scale))
    chosen = with_chosen_tokens(made, current, config(fraction=0.9, high=6.0), seed=0, step=0)
    assert chosen.scale[0].tolist() == [1.0, 0.0, 0.5] and chosen.scale[1].tolist() == [1.0, 1.0, 0.0]
    assert chosen.token_weights is made.token_weights and chosen.facts["clip_cov/n_selected"] == 2.0
    assert with_chosen_tokens(made, current, config(fraction=0.0), seed=0, step=0) is made


def test_nothing_trained_is_an_error():
    with pytest.raises(ValueError, match="no token is trained"):
        choose_tokens(inputs([f(-1.0)], [f(1.0)], masks=[torch.tensor([False])]), config())
