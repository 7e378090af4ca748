"""Rewards: strict extraction, comparison by value, safe expressions, checked scores. Golden values from definitions."""

import threading
import time
from fractions import Fraction

import psutil
import pytest

from mcore_rl.rewards.checks import require_reward, score_completions
from mcore_rl.rewards.expression import evaluate_expression, reaches_target
from mcore_rl.rewards.extraction import extract_boxed, extract_hash, extract_solution, full_format, write_slot
from mcore_rl.rewards.grading import INTEGER, Grader
from mcore_rl.rewards.judge import MathJudge
from mcore_rl.rewards.values import parse_gsm8k_answer, parse_number, same_value
from mcore_rl.types import Completion, Prompt, Score


@pytest.fixture(scope="module")
def judge():
    made = MathJudge(limit_s=2)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 7 } and again \boxed{7}", "7"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{7} then \boxed{8}", None),
        ("the answer is 42", None),
        (r"\boxed{42", None),
        (r"\boxed{7} \boxed{7", None),
        (r"\boxed{\boxed{7}}", None),
        (r"\boxed{}", None),
        (r"\boxed 7", None),
        ("", None),
    ],
)
def test_boxed_is_strict(text, value):
    assert extract_boxed(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("work\n#### 72", "72"), ("#### 72\n#### 72", "72"), ("#### 72\n#### 73", None), ("72", None), ("a #### 72", None)],
)
def test_hash_is_strict(text, value):
    assert extract_hash(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a <SOLUTION> 5 </SOLUTION> b", "5"),
        ("<SOLUTION>5</SOLUTION><SOLUTION>6</SOLUTION>", None),
        ("<SOLUTION>5", None),
        ("<SOLUTION><SOLUTION>5</SOLUTION></SOLUTION>", None),
        ("5", None),
    ],
)
def test_solution_is_strict(text, value):
    assert extract_solution(text) == value


@pytest.mark.parametrize("pattern", ["boxed", "hash", "solution"])
def test_a_written_slot_reads_back(pattern):
    text = "7 5 " + write_slot(pattern, "-9")
    match = full_format(pattern, INTEGER).fullmatch(text)
    assert match is not None
    assert match.group(1) == "-9"
    assert full_format(pattern, INTEGER).fullmatch(text + " ") is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", Fraction(12)),
        ("12.0", Fraction(12)),
        ("-3", Fraction(-3)),
        ("1,000", Fraction(1000)),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("1/2", Fraction(1, 2)),
        (r"-\frac{3}{4}", Fraction(-3, 4)),
        ("0.5", Fraction(1, 2)),
        (r"\$18", Fraction(18)),
        ("17.", Fraction(17)),
        ("1,00", None),
        ("1/0", None),
        ("two", None),
        ("1e9", None),
        ("9" * 65, None),
    ],
)
def test_numbers_are_exact(text, value):
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("candidate", "reference", "equal"),
    [
        ("1/2", "0.5", True),
        ("12", "12.0", True),
        ("1,000", "1000", True),
        ("0.1", "1/10", True),
        ("13", "12", False),
        (r"\sqrt{4}", "2", True),
        (r"3 \text{ apples}", "3", True),
        ("x", "3", False),
        ("", "3", False),
    ],
)
def test_values_not_texts_are_compared(judge, candidate, reference, equal):
    assert same_value(candidate, reference, judge) is equal


def test_math_verify_cannot_hang_even_in_a_thread():
    """A power tower never returns from C code; the limit holds, the next question is answered, the process ends."""
    judge, seen, before = MathJudge(limit_s=1), [], set(psutil.Process().children(recursive=True))

    def work():
        judge.same("1", "1")
        begun = time.monotonic()
        seen.append(judge.same("9^{9^{9^9}}", "3"))
        seen.append(time.monotonic() - begun)
        seen.append(judge.same(r"\sqrt{9}", "3"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    judge.close()
    assert seen[0] is False
    assert seen[1] < 10
    assert seen[2] is True
    assert judge.timeouts == 1
    assert set(psutil.Process().children(recursive=True)) <= before


def test_math_verify_prints_nothing(capfd):
    judge = MathJudge(limit_s=2)
    judge.same(r"\frac{", "3")
    judge.close()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("a <<3+4=7>>7\n#### 7", "7"),
        ("x\n#### 1,450", "1450"),
        ("#### -3", "-3"),
        ("x #### 2.5\n", "2.5"),
        ("#### -1,234,567.5", "-1234567.5"),
    ],
)
def test_gsm8k_reference(answer, value):
    assert parse_gsm8k_answer(answer) == value


@pytest.mark.parametrize(
    "answer",
    ["7", "#### ", "#### seven", "#### 7 apples", "#### 7\n#### 8", "#### 1,2", "#### 12,34", "#### ,,,5", "#### 1000,000"],
)
def test_gsm8k_reference_refuses(answer):
    with pytest.raises(ValueError, match="####"):
        parse_gsm8k_answer(answer)


def test_expression_value_and_numbers():
    assert evaluate_expression("(3+4)*12/2 - 1") == (Fraction(41), [3, 4, 12, 2, 1])


@pytest.mark.parametrize(
    "text",
    [
        "2**9",
        "7//2",
        "-3+4",
        "__import__('os')",
        "a",
        "3+",
        "1/0",
        "1/(2-2)",
        "",
        "1 2",
        "007",
        "(" * 60 + "1" + ")" * 60,
        "9" * 200,
    ],
)
def test_expression_refuses(text):
    with pytest.raises(ValueError):
        evaluate_expression(text)


def test_countdown_uses_each_number_once():
    assert reaches_target("(3+7)*12", [3, 7, 12], 120)
    assert not reaches_target("(3+7)*12", [3, 7, 12], 121)
    assert not reaches_target("3*7", [3, 7, 12], 21)
    assert reaches_target("3*7", [3, 7, 12], 21, use_all=False)
    assert not reaches_target("3*7*7", [3, 7, 12], 147, use_all=False)
    assert not reaches_target("120", [3, 7, 12], 120)


def grader(full):
    return Grader("boxed", INTEGER, full, lambda extracted, prompt: int(extracted) == int(prompt.answer))


@pytest.mark.parametrize(
    ("full", "text", "stopped", "score"),
    [
        (True, r"7 5 \boxed{9}", True, Score(1.0, True, "9", True, False, goal=1.0)),
        (True, r"\boxed{8}", True, Score(0.0, False, "8", True, False)),
        (True, r"\boxed{9}", False, Score(0.0, False, "9", False, True)),
        (True, r"\boxed{9} ok", True, Score(0.0, False, None, False, False)),
        (True, r"\a \boxed{9}", True, Score(0.0, False, None, False, False)),
        (False, r"\boxed{9} ok", True, Score(1.0, True, "9", True, False, goal=1.0)),
        (False, r"\boxed{9} and on and on", False, Score(0.0, False, "9", False, True)),
        (False, "9", True, Score(0.0, False, None, False, False)),
    ],
)
def test_grades(full, text, stopped, score):
    assert grader(full).grade(Prompt("p", (1,), "q", "9"), text, stopped=stopped) == score


def test_unknown_pattern_is_named():
    with pytest.raises(ValueError, match=r"task\.answer_pattern: 'box'"):
        Grader("box", INTEGER, True, lambda extracted, prompt: True)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), -float("inf"), "1", True, 10**400, -(10**4000), 1e13])
def test_unusable_reward_stops_the_run_and_names_the_sample(value):
    with pytest.raises(ValueError, match="s3-p17/2"):
        require_reward(value, "s3-p17/2")


class Fixed:
    """A task that gives one reward to everything."""

    def __init__(self, reward):
        self.reward = reward

    def score(self, prompt, completion):
        return Score(self.reward, False, None, False, False)


def completion(prompt_id, index):
    return Completion(prompt_id, index, (1,), (2,), (0.0,), "stop", 0)


def test_scores_of_a_batch():
    prompts = [Prompt("a", (1,), "q", "1"), Prompt("b", (1,), "q", "1")]
    batch = [completion("a", 0), completion("a", 1), completion("b", 0)]
    assert [score.reward for score in score_completions(Fixed(0.5), prompts, batch)] == [0.5, 0.5, 0.5]
    with pytest.raises(ValueError, match="a/0"):
        score_completions(Fixed(float("nan")), prompts, batch)
    with pytest.raises(ValueError, match="c/0"):
        score_completions(Fixed(0.5), prompts, [completion("c", 0)])
    with pytest.raises(ValueError, match="a/0: given twice"):
        score_completions(Fixed(0.5), prompts, [batch[0], batch[0]])
    with pytest.raises(ValueError, match="only 1 different ids"):
        score_completions(Fixed(0.5), [prompts[0], prompts[0]], batch)
