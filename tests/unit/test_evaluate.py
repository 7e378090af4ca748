"""Evaluation through an engine: conditions, rates, pairing."""

import json

import pytest
from scipy.stats import binomtest

from mcore_rl.config.schema import TaskConfig
from mcore_rl.data.build import build_task
from mcore_rl.data.tokenizer import build_tokenizer
from mcore_rl.evaluate import EvalResult, EvalSpec, evaluate, paired_gain
from mcore_rl.types import Completion, StaleRollout

TOKENIZER = build_tokenizer()
TASK = build_task(TaskConfig(), TOKENIZER, seed=0)


class Engine:
    """Answers the i-th prompt with the i-th style: right, wrong, unfinished, shapeless; then over again."""

    name = "scripted"
    version = 4

    def __init__(self, styles, versions=(4,)):
        self.styles, self.versions, self.asked = styles, versions, []

    def generate(self, prompts, sampling):
        self.asked.append(sampling)
        return [self.answer(i, prompt) for i, prompt in enumerate(prompts)]

    def answer(self, i, prompt):
        right = int(prompt.answer)
        style = self.styles[i % len(self.styles)]
        text = {"right": f"\\boxed{{{right}}}", "wrong": f"\\boxed{{{(right + 1) % 10}}}", "cut": "1 2 3", "loose": str(right)}[
            style
        ]
        ids = TOKENIZER.encode(text, add_special_tokens=False) + ([] if style == "cut" else [2])
        reason = "length" if style == "cut" else "stop"
        version = self.versions[i % len(self.versions)]
        return Completion(prompt.prompt_id, 0, prompt.token_ids, tuple(ids), (0.0,) * len(ids), reason, version)


def spec(**fields):
    values = {"split": "test", "prompts": 40, "temperature": 0.0, "max_tokens": 32, "stop_token_ids": (2,)}
    return EvalSpec(**(values | {"extraction": TASK.grader.mode} | fields))


def test_rates_and_conditions():
    """Of every four: 6, 6, 5 and 2 tokens (stop token counted)."""
    engine = Engine(["right", "wrong", "cut", "loose"])
    result = evaluate(TASK, engine, spec())
    assert (result.n, result.accuracy, result.format_rate, result.truncation_rate) == (40, 0.25, 0.5, 0.25)
    assert (result.mean_reward, result.extracted_rate, result.version) == (0.25, 0.5, 4)
    assert result.mean_length_tokens == (6 + 6 + 5 + 2) / 4
    assert result.correct == (1, 0, 0, 0) * 10
    interval = binomtest(10, 40).proportion_ci(method="wilson")
    assert result.ci95_half_width == pytest.approx((interval.high - interval.low) / 2)
    assert (result.decoding, result.extraction, result.max_tokens) == ("greedy", "boxed/full/v1", 32)
    asked = engine.asked[0]
    assert (asked.temperature, asked.top_p, asked.top_k, asked.samples_per_prompt) == (0.0, 1.0, 0, 1)
    assert evaluate(TASK, engine, spec(temperature=1.0)).decoding == "temperature 1"


def test_json_round_trip():
    result = evaluate(TASK, Engine(["right", "cut"]), spec())
    assert EvalResult.from_json(json.loads(json.dumps(result.to_json()))) == result


def test_gain_is_paired_over_the_same_prompts():
    before, after = (evaluate(TASK, Engine(styles), spec()) for styles in (["wrong", "right"], ["right", "right"]))
    gain = paired_gain(before, after)
    assert gain.mean == 0.5
    assert 0.3 < gain.low < 0.5 < gain.high < 0.7
    assert paired_gain(before, before).high == 0.0


@pytest.mark.parametrize(
    "change", [{"prompts": 39}, {"temperature": 1.0}, {"max_tokens": 31}, {"extraction": "x"}, {"split": "val"}]
)
def test_other_conditions_are_not_comparable(change):
    engine = Engine(["right"])
    with pytest.raises(ValueError, match="not comparable"):
        paired_gain(evaluate(TASK, engine, spec()), evaluate(TASK, engine, spec(**change)))


def test_mixed_versions_and_lost_completions_stop():
    with pytest.raises(StaleRollout, match=r"\[4, 5\]"):
        evaluate(TASK, Engine(["right"], versions=(4, 5)), spec())
    engine = Engine(["right"])
    engine.generate = lambda prompts, sampling: [engine.answer(0, prompts[0])]
    with pytest.raises(ValueError, match="40 prompts; the 1 completions"):
        evaluate(TASK, engine, spec())
    with pytest.raises(ValueError, match=r"eval\.prompts=0"):
        evaluate(TASK, engine, spec(prompts=0))
