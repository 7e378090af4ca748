"""Reward functions of the user's: what counts as a reward, what drops a sample, what stops the run, and what a dropped
sample does to its group."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mcore_rl.batching import build_rollout_batch, train_batch
from mcore_rl.config.reward import RewardConfig, RewardForm
from mcore_rl.config.schema import Aggregation, AlgorithmConfig, Baseline
from mcore_rl.rewards.checks import score_completions
from mcore_rl.rewards.user_reward import UserReward
from mcore_rl.types import Completion, Prompt, Score, StopRun

SUPPORT = Path(__file__).resolve().parents[1] / "support"
PLAIN = Score(0.0, False, None, True, False)


@pytest.fixture(autouse=True)
def reward_functions_on_the_path(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]))


class Texts:
    """A task whose verdict is always the same, and whose completion i of prompt p says texts[p][i]."""

    def __init__(self, **texts):
        self.texts = texts

    def score(self, prompt, completion):
        return PLAIN

    def text(self, completion):
        return self.texts[completion.prompt_id][completion.sample_index]


def asked(task):
    prompts = [Prompt(name, (1, 2), f"question {name}", "1") for name in task.texts]
    completions = [
        Completion(name, i, (1, 2), (5, 6, 2)[: 1 + i % 3], (-1.0,) * (1 + i % 3), "stop", 0)
        for name, texts in task.texts.items()
        for i in range(len(texts))
    ]
    return prompts, completions


def judged(name, task, **fields):
    reward = UserReward(RewardConfig(**{"function": f"reward_functions:{name}", "workers": 1, "timeout_s": 0.5} | fields))
    try:
        return score_completions(task, *asked(task), reward)
    finally:
        reward.close()


def test_results_that_are_rewards():
    silu = {"form": RewardForm.gated_silu}
    scores = judged("odd", Texts(a=["float32", "int64", "reward", "goal"]), **silu)
    assert [score.reward for score in scores[:3]] == [0.25, 2.0, 0.5]
    assert (scores[2].correct, dict(scores[2].components)) == (True, {"style": 0.5})
    assert scores[3].reward == pytest.approx(0.5 + 0.5 * 0.6224593 * 0.5)  # sigmoid(0.5) = 0.6224593, aux = 1 - 0.5
    assert dict(scores[3].components) == {"goal": 0.5, "grounding": 1.0, "cost": -0.5}
    assert [score.correct for score in scores] == [False, False, True, False]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none", "is None"),
        ("nan", "is nan"),
        ("inf", "is inf"),
        ("text", "is '1.0'"),
        ("list", r"is \[1.0\]"),
        ("true", "is True"),
        ("object", "PosixPath"),
        ("unknown", r"keys \['score'\]"),
        ("two", r"keys \['goal', 'reward'\]"),
        ("half", "component cost of sample a/1 is None"),
        ("beyond", "goal=1.5"),
        ("inverted", "no more than a wrong answer"),
    ],
)
def test_results_that_are_none_stop_the_run_and_name_the_sample(text, message):
    with pytest.raises(ValueError, match=message) as stopped:
        judged("odd", Texts(a=["float32", text]), form=RewardForm.gated_silu)
    assert "a/1" in str(stopped.value)


def test_components_need_a_form_that_has_them():
    with pytest.raises(ValueError, match=r"a/0.*no place in reward\.form=goal"):
        judged("odd", Texts(a=["goal"]))


def test_a_failed_call_drops_its_sample_by_reason():
    scores = judged("echo", Texts(a=["1", "sleep", "0", "exit"], b=["raise", "1", "1", "0"]), max_failed_frac=0.5)
    assert [score.failure for score in scores] == [None, "timeout", None, "crash", "error", None, None, None]
    assert [math.isnan(score.reward) for score in scores] == [f is not None for f in (None, 1, None, 1, 1, None, None, None)]


def test_too_many_failures_stop_the_run():
    with pytest.raises(StopRun, match=r"2 of 4 calls failed \{'error': 2\}.*max_failed_frac=0.25.*a/0.*KeyError"):
        judged("echo", Texts(a=["raise", "raise", "1", "1"]))
    assert judged("echo", Texts(a=["raise", "1", "1", "1"]))[0].failure == "error"


def batch(scores, prompts, completions, baseline=Baseline.group_mean_std):
    algorithm = AlgorithmConfig(baseline=baseline, aggregation=Aggregation.seq_mean_token_mean)
    return algorithm, build_rollout_batch(
        prompts, completions, scores, algorithm=algorithm, version=0, samples_per_prompt=len(completions) // len(prompts)
    )


@pytest.mark.parametrize("baseline", [Baseline.group_mean, Baseline.group_mean_std, Baseline.leave_one_out])
def test_the_rest_of_the_group_learns_as_if_the_sample_had_never_been(baseline):
    """Advantages and token weights with sample a/1 dropped equal those of the batch that never had it."""
    prompts, completions = asked(Texts(a=["", "", "", ""], b=["", "", "", ""]))
    rewards = [1.0, math.nan, 0.0, 0.25, 1.0, 0.0, 0.0, 0.0]
    scores = [replace(PLAIN, reward=reward) for reward in rewards]
    scores[1] = replace(scores[1], failure="timeout")
    algorithm, dropped = batch(scores, prompts, completions, baseline)
    kept = [0, 2, 3, 4, 5, 6, 7]
    assert dropped.advantages.values[1] == 0.0
    for group in (slice(0, 3), slice(3, 7)):
        mine = dropped.advantages.values[kept][group]
        values = torch.tensor([rewards[i] for i in kept], dtype=torch.float64)[group]
        centred = values - values.mean()
        expected = {
            Baseline.group_mean: centred,
            Baseline.group_mean_std: centred / (values.std(correction=1) + 1e-6),
            Baseline.leave_one_out: centred * len(values) / (len(values) - 1),
        }[baseline]
        assert torch.allclose(mine.double(), expected, atol=1e-6)
    weights = train_batch(dropped, range(8), algorithm, old=None).token_weights
    assert not weights[1].any()
    lengths = [len(completion.token_ids) for completion in completions]
    for i in kept:  # mean over the 7 sequences that train, then over each one's response tokens
        assert weights[i].sum() == pytest.approx(1 / 7)
        assert weights[i][-1] == pytest.approx(1 / (7 * lengths[i]))


def test_a_group_with_one_sample_left_teaches_nothing_and_is_counted():
    prompts, completions = asked(Texts(a=["", ""], b=["", ""]))
    scores = [replace(PLAIN, reward=r) for r in (1.0, math.nan, 1.0, 0.0)]
    scores[1] = replace(scores[1], failure="crash")
    _, made = batch(scores, prompts, completions)
    assert made.advantages.singleton_groups == 1
    assert made.advantages.values[:2].tolist() == [0.0, 0.0]
    assert made.advantages.values[2] == -made.advantages.values[3] != 0


def test_a_batch_without_any_reward_stops():
    prompts, completions = asked(Texts(a=["", ""]))
    scores = [replace(PLAIN, reward=math.nan, failure="error")] * 2
    with pytest.raises(ValueError, match="none of the 2 samples of this batch has a reward"):
        batch(scores, prompts, completions)


def test_an_update_in_which_every_sample_is_dropped_stops():
    """Its loss is undefined; a step of the optimizer on nothing would be momentum alone."""
    prompts, completions = asked(Texts(a=["", ""], b=["", ""]))
    scores = [replace(PLAIN, reward=math.nan, failure="error")] * 2 + [replace(PLAIN, reward=r) for r in (1.0, 0.0)]
    algorithm, made = batch(scores, prompts, completions)
    with pytest.raises(ValueError, match="no token is trained in this update of 2 sequences"):
        train_batch(made, [0, 1], algorithm, old=None)


def test_the_same_question_twice_is_two_groups():
    """Occurrences a and b ask the same; each is centred by its own samples."""
    prompts, completions = asked(Texts(a=["", ""], b=["", ""]))
    prompts = [replace(prompt, question="the same") for prompt in prompts]
    _, made = batch([replace(PLAIN, reward=r) for r in (1.0, 0.0, 0.0, 0.0)], prompts, completions, Baseline.group_mean)
    assert made.advantages.values.tolist() == [0.5, -0.5, 0.0, 0.0]


def test_a_function_that_is_not_there_is_refused_by_key():
    with pytest.raises(ValueError, match=r"reward\.function=reward_functions:nowhere: .*no function 'nowhere'"):
        UserReward(RewardConfig(function="reward_functions:nowhere"))


def test_the_version_is_of_the_file_that_pays():
    reward = UserReward(RewardConfig(function="reward_functions:echo"))
    reward.close()
    assert reward.version.startswith("reward_functions:echo#")
    assert len(reward.version.rpartition("#")[2]) == 12
