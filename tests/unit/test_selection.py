"""Selection: groups kept or dropped as a whole, filled up in order, counted; overlong answers filtered or paying softly."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_rl import stages
from mcore_rl.algorithms.selection import Graded, choose_groups, overlong_reward, sort_groups
from mcore_rl.batching import build_rollout_batch, train_batch
from mcore_rl.config.algorithm import Aggregation, AlgorithmConfig, Baseline, Overlong, SelectionConfig
from mcore_rl.config.schema import RunConfig
from mcore_rl.selecting import enough, select_groups, usable_samples, with_length_penalty
from mcore_rl.types import Completion, Prompt, Score

DYNAMIC = SelectionConfig(dynamic_sampling=True)


def scores(*rewards, truncated=()):
    return [
        Score(r, r >= 1.0, None, True, i in truncated, failure="timeout" if math.isnan(r) else None)
        for i, r in enumerate(rewards)
    ]


def groups(*names, size=2):
    return [name for name in names for _ in range(size)]


def test_groups_are_told_by_reward_and_verdict():
    # a mixed, b all wrong though wrong pays -1, c all right, d one reward but two verdicts, e without a reward
    graded = Graded(
        groups("a", "b", "c", "d", "e"),
        [1, 0, -1, -1, 1, 1, 0.5, 0.5, 0, 1],
        [True, False, False, False, True, True, True, False, False, True],
        [True] * 8 + [False] * 2,
    )
    found = sort_groups(graded, DYNAMIC)
    assert (found.mixed, found.all_wrong, found.all_right) == (["a"], ["b"], ["c"])
    assert (found.one_reward, found.unusable, found.outside) == (["d"], ["e"], [])


def test_pass_rate_band_looks_at_the_verdict_of_whole_groups():
    band = SelectionConfig(pass_rate_low=0.25, pass_rate_high=0.75)
    verdicts = [True] * 4 + [True, True, False, False] + [False] * 4
    found = sort_groups(Graded(groups("a", "b", "c", size=4), [0.5] * 12, verdicts, [True] * 12), band)
    assert (found.outside, found.one_reward) == (["a", "c"], ["b"])
    names, filling = choose_groups(found, ["a", "b", "c"], 2, band)
    assert (names, filling) == (["b", "a"], 1)


def test_wanted_groups_first_then_filled_up_and_counted():
    ids = groups("a", "b", "c", "d")
    found = select_groups(ids, scores(0, 0, 1, 0, 1, 1, 0, 1), 3, DYNAMIC)
    assert found.prompt_ids == ("b", "d", "a")
    assert found.facts["dynsamp/filling_groups"] == 1.0 and found.facts["dynsamp/gen_batches"] == pytest.approx(4 / 3)
    assert (found.facts["dynsamp/dropped_all_wrong"], found.facts["dynsamp/dropped_all_right"]) == (0.0, 1.0)
    assert found.facts["group/zero_var_frac_trained"] == pytest.approx(1 / 3) and found.facts["group/effective_size"] == 2.0
    surplus = select_groups(ids, scores(0, 1, 1, 0, 1, 0, 0, 1), 3, DYNAMIC)
    assert surplus.prompt_ids == ("a", "b", "c") and surplus.facts["drop/surplus_groups"] == 1.0


def test_a_mixed_group_is_kept_or_dropped_as_a_whole():
    """[1, 0, 0, 0] keeps its zeros: no row of a kept group is filtered for having the reward of its neighbours."""
    found = select_groups(groups("a", "b", size=4), scores(0, 0, 0, 0, 1, 0, 0, 0), 1, DYNAMIC)
    assert found.prompt_ids == ("b",) and found.facts["group/effective_size"] == 4.0


def test_without_selection_everything_is_trained():
    found = select_groups(groups("a", "b"), scores(0, 0, 1, 1), 2, SelectionConfig())
    assert found.prompt_ids == ("a", "b") and not any(name.startswith("dynsamp") for name in found.facts)
    assert enough(groups("a", "b"), scores(0, 0, 1, 1), 2, SelectionConfig())
    with pytest.raises(ValueError, match="1 groups were drawn, 2 are needed"):
        select_groups(groups("a"), scores(0, 1), 2, DYNAMIC)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=1, max_size=8), st.data())
def test_the_batch_keeps_its_size_and_mixed_groups_come_first(rewards, data):
    count = data.draw(st.integers(1, len(rewards)))
    names = [f"g{i}" for i in range(len(rewards))]
    found = select_groups(groups(*names, size=3), scores(*[r for group in rewards for r in group]), count, DYNAMIC)
    mixed = [name for name, group in zip(names, rewards, strict=True) if len(set(group)) > 1]
    assert len(found.prompt_ids) == len(set(found.prompt_ids)) == count
    assert list(found.prompt_ids[: len(mixed)]) == mixed[:count]
    assert found.facts["dynsamp/filling_groups"] == max(0, count - len(mixed))


def test_soft_overlong_penalty_by_hand():
    # 100 tokens, buffer 20: free up to 80, half at 90, whole at 100
    penalty = SelectionConfig(overlong=Overlong.penalty, overlong_buffer=0.2, overlong_penalty=2.0)
    assert [overlong_reward(n, penalty, 100) for n in (10, 80, 90, 100)] == [0.0, 0.0, -1.0, -2.0]
    assert overlong_reward(100, SelectionConfig(), 100) == 0.0
    paid = with_length_penalty(scores(1, 0), [90, 10], penalty, 100)
    assert [score.reward for score in paid] == [0.0, 0.0] and paid[0].correct


def rollout(found, algorithm):
    prompts = [Prompt("p", (1, 2), "q", "a")]
    completions = [Completion("p", i, (1, 2), (5, 6, 7), (-0.1,) * 3, "length", 0) for i in range(len(found))]
    return build_rollout_batch(prompts, completions, found, algorithm=algorithm, version=0, samples_per_prompt=len(found))


def test_a_filtered_answer_leaves_baseline_and_loss():
    algorithm = AlgorithmConfig(
        baseline=Baseline.group_mean, aggregation=Aggregation.token_mean, selection=SelectionConfig(overlong=Overlong.filter)
    )
    found = scores(1, 0, 0, float("nan"), truncated=(2,))
    assert usable_samples(found, algorithm.selection) == [True, True, False, False]
    made = rollout(found, algorithm)
    assert made.advantages.values.tolist() == [0.5, -0.5, 0.0, 0.0]
    assert [int(mask.sum()) for mask in made.tokens.loss_mask] == [3, 3, 0, 0]
    facts = select_groups(made.prompt_ids, found, 1, algorithm.selection).facts
    assert facts["drop/overlong_frac"] == 0.25 and facts["group/effective_size"] == 2.0


def test_an_update_of_filtered_answers_alone_is_an_error():
    algorithm = AlgorithmConfig(aggregation=Aggregation.token_mean, selection=SelectionConfig(overlong=Overlong.filter))
    made = rollout(scores(1, 0, truncated=(0, 1)), algorithm)
    with pytest.raises(ValueError, match="no token is trained in this update of 2 sequences"):
        train_batch(made, [0, 1], algorithm, old=None)


def test_rounds_of_generation_are_capped_and_keyed(monkeypatch):
    """Nothing but unanimous groups: exactly max_rounds rounds, drawn at steps that no other round of the run uses."""
    config = RunConfig()
    config.train.steps, config.train.prompts_per_step, config.train.samples_per_prompt = 10, 2, 2
    config.algorithm.selection = SelectionConfig(dynamic_sampling=True, max_rounds=3)
    run, drawn = SimpleNamespace(config=config), []

    def draw(run, step):
        drawn.append(step)
        return [Prompt(f"{step}-{i}", (1,), "q", "a") for i in range(2)]

    def roll_out(run, prompts, step):
        return [Completion(p.prompt_id, i, (1,), (2,), (-1.0,), "stop", 0) for p in prompts for i in range(2)]

    def score(run, prompts, completions):
        mixed = completions[0].prompt_id.startswith("17-")
        return scores(*([0, 1] if mixed else [0, 0]) * 2)

    for name, function in (("draw_prompts", draw), ("roll_out", roll_out), ("score", score)):
        monkeypatch.setattr(stages, name, function)

    def filled(step):
        prompts = draw(run, step)
        answers = roll_out(run, prompts, step)
        return stages.fill_up(run, step, prompts, answers, score(run, prompts, answers))

    prompts, completions, found = filled(4)
    assert drawn == [4, 14, 24] and (len(prompts), len(completions), len(found)) == (6, 12, 12)
    assert len({prompt.prompt_id for prompt in prompts}) == 6
    drawn.clear()
    assert len(filled(7)[0]) == 4 and drawn == [7, 17]


def test_pass_rates_expected_of_unanimous_groups():
    """p^n + (1 - p)^n: n = 8: .663 at p = .05, .168 at .2, .008 at .5."""
    generator = torch.Generator().manual_seed(0)
    for p, expected in ((0.05, 0.663), (0.2, 0.168), (0.5, 0.008)):
        draws = (torch.rand(4000, 8, generator=generator) < p).float()
        names = [f"g{i}" for i in range(4000)]
        graded = Graded(groups(*names, size=8), draws.flatten().tolist(), (draws > 0).flatten().tolist(), [True] * 32_000)
        assert 1 - len(sort_groups(graded, DYNAMIC).mixed) / 4000 == pytest.approx(expected, abs=0.03)
