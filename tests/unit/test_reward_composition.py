"""The correctness gate: a wrong answer earns nothing whatever else it does. Golden values from R = F1 + F1 sigmoid(F1) aux."""

import math

import pytest

from mcore_rl.config.reward import PartialCredit, RewardForm
from mcore_rl.rewards.composition import Composition, compose, gated_product, gated_silu
from mcore_rl.rewards.grading import INTEGER, Grader
from mcore_rl.rewards.partial_credit import box_iou, parse_box, token_f1
from mcore_rl.rewards.statistics import component_statistics, failure_counts
from mcore_rl.types import Prompt, Score

SILU, PRODUCT, GOAL = RewardForm.gated_silu, RewardForm.gated_product, RewardForm.goal


@pytest.mark.parametrize(
    ("goal", "gate"), [(0.0, 0.0), (0.1, 0.0525), (0.3, 0.1723), (0.5, 0.3112), (0.7, 0.4677), (1.0, 0.7311)]
)
def test_the_gate_is_silu_of_the_goal(goal, gate):
    """x / (1 + e^-x): 0.1 / (1 + 0.904837) = 0.0525, 1 / (1 + 0.367879) = 0.7311."""
    assert gated_silu(goal, 1.0) - goal == pytest.approx(gate, abs=5e-5)
    assert gated_silu(goal, -0.5) == pytest.approx(goal - gate / 2, abs=5e-5)
    assert gated_product(goal, 0.5) == pytest.approx(1.5 * goal)


@pytest.mark.parametrize("form", [SILU, PRODUCT])
def test_wrong_and_busy_is_worth_what_wrong_and_plain_is(form):
    busy = {"format": 1.0, "grounding": 1.0, "search": 1.0}
    assert compose(form, 0.0, busy) == compose(form, 0.0, {}) == 0.0
    assert compose(form, 0.0, {"spam": -1.0}) == 0.0


@pytest.mark.parametrize("form", [SILU, PRODUCT])
def test_right_and_plain_beats_wrong_and_busy_where_a_sum_would_not(form):
    """Linear 1.0 F1 + 0.6 grounding + 0.6 format pays 1.2 for the wrong one and 1.0 for the right one."""
    wrong, right = {"grounding": 0.6, "format": 0.6}, {"grounding": 0.0, "format": 0.0}
    assert 0.0 + sum(wrong.values()) > 1.0 + sum(right.values())
    assert compose(form, 0.0, wrong) < compose(form, 1.0, right)


@pytest.mark.parametrize(
    ("form", "goal", "terms", "message"),
    [
        (SILU, 1.2, {}, "goal=1.2"),
        (SILU, -0.1, {}, "goal=-0.1"),
        (SILU, math.nan, {}, "goal=nan"),
        (SILU, 1.0, {"cost": math.nan}, "component cost=nan"),
        (SILU, 1.0, {"cost": -1.5}, "no more than a wrong answer"),  # 1 - 0.731 * 1.5 < 0
        (PRODUCT, 1.0, {"cost": -1.0}, "no more than a wrong answer"),
        (GOAL, 1.0, {"cost": -0.1}, "no place in reward.form=goal"),
    ],
)
def test_what_cannot_be_composed(form, goal, terms, message):
    with pytest.raises(ValueError, match=message):
        compose(form, goal, terms)


def test_the_goal_alone_is_the_reward():
    assert [compose(GOAL, goal, {}) for goal in (0.0, 0.4, 1.0)] == [0.0, 0.4, 1.0]


@pytest.mark.parametrize(
    ("candidate", "reference", "f1"),
    [
        ("red blue", "blue red", 1.0),
        ("red", "red blue", 2 / 3),  # precision 1, recall 1/2
        ("Red, green; blue", "red blue", 4 / 5),  # precision 2/3, recall 1
        ("red red", "red", 2 / 3),  # precision 1/2, recall 1
        ("green", "red", 0.0),
        ("", "red", 0.0),
        ("", "", 0.0),
    ],
)
def test_token_f1(candidate, reference, f1):
    assert token_f1(candidate, reference) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("candidate", "reference", "iou"),
    [
        ("0, 0, 2, 2", "[0, 0, 2, 2]", 1.0),
        ("0,0,2,2", "1,1,3,3", 1 / 7),  # 1 shared of 4 + 4 - 1
        ("0,0,1,1", "2,2,3,3", 0.0),
        ("0,0,1,1", "1,0,2,1", 0.0),  # they touch
        ("0,0,1", "0,0,1,1", 0.0),
        ("2,0,0,1", "0,0,1,1", 0.0),  # x1 > x2
        ("box 0,0,1,1", "0,0,1,1", 0.0),
        ("0,0,0,0", "0,0,0,0", 0.0),
    ],
)
def test_box_iou(candidate, reference, iou):
    assert box_iou(candidate, reference) == pytest.approx(iou)


def test_boxes_are_strict():
    assert parse_box("(0.5, -1, 2, 3)") == (0.5, -1.0, 2.0, 3.0)
    assert parse_box("1e3,0,2e3,1") is None
    assert parse_box("nan,0,1,1") is None


def graded(composition, text, *, stopped=True, n_tokens=0, reference="red blue", body=r"[a-z ]+"):
    grader = Grader("boxed", body, True, lambda extracted, prompt: extracted == prompt.answer, composition)
    return grader.grade(Prompt("p", (1,), "q", reference), text, stopped=stopped, n_tokens=n_tokens)


def test_partial_credit_is_a_graded_reward_and_no_verdict():
    composition = Composition(partial_credit=PartialCredit.token_f1)
    half = graded(composition, r"\boxed{red}")
    assert (half.reward, half.goal, half.correct) == (pytest.approx(2 / 3), pytest.approx(2 / 3), False)
    assert graded(composition, r"\boxed{red blue}").reward == 1.0


@pytest.mark.parametrize(("text", "stopped"), [("red blue", True), (r"\boxed{red blue}", False), (r"\boxed{red blue} x", True)])
def test_the_format_is_a_gate_for_partial_credit_too(text, stopped):
    score = graded(Composition(partial_credit=PartialCredit.token_f1), text, stopped=stopped)
    assert (score.reward, score.goal, score.correct) == (0.0, 0.0, False)


def test_length_costs_a_right_answer_and_never_more_than_half():
    """0.001 a token: 100 tokens cost 0.1, so R = 1 - 0.7311 * 0.1; 10,000 tokens cost 0.5."""
    composition = Composition(SILU, PartialCredit.none, 0.001)
    short, long = (graded(composition, r"\boxed{red blue}", n_tokens=n) for n in (100, 10_000))
    assert short.reward == pytest.approx(1 - 0.0731059, abs=1e-6)
    assert long.reward == pytest.approx(1 - 0.365529, abs=1e-6)
    assert dict(short.components) == {"goal": 1.0, "length_cost": pytest.approx(-0.1)}
    assert graded(composition, r"\boxed{red}", n_tokens=100).reward == 0.0


def test_the_version_names_what_changes_a_reward():
    grader = Grader("boxed", INTEGER, True, lambda extracted, prompt: True, Composition(SILU, PartialCredit.token_f1, 0.01))
    assert grader.reward_version == "1/gated_silu+token_f1+length0.01"


def test_the_spread_of_every_component_and_the_failures_by_reason():
    def score(failure=None, **components):
        return Score(0.0, False, None, True, False, components=components, failure=failure)

    scores = [score(goal=1.0, cost=-0.2), score(goal=0.0, cost=-0.2), score(goal=1.0, cost=-0.2, bonus=0.5), score("timeout")]
    assert component_statistics(scores) == {
        "reward_component_mean/goal": pytest.approx(2 / 3),
        "reward_component_std/goal": pytest.approx(math.sqrt(2) / 3),
        "reward_component_mean/cost": pytest.approx(-0.2),
        "reward_component_std/cost": 0.0,
        "reward_component_mean/bonus": 0.5,
        "reward_component_std/bonus": 0.0,
    }
    assert failure_counts(scores) == {"drop/reward_timeout": 1.0, "drop/reward_crash": 0.0, "drop/reward_error": 0.0}
