"""The word problems that ship with the repository: every annotated step computes, and the steps lead to the answer."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from mcore_rl.config.schema import TaskConfig
from mcore_rl.data.intake import take_in
from mcore_rl.rewards.expression import evaluate_expression
from mcore_rl.rewards.values import parse_number

DATA = Path(__file__).resolve().parents[2] / "configs" / "data"
FILES = {"train": DATA / "word_problems_train.jsonl", "test": DATA / "word_problems_test.jsonl"}
STEP = re.compile(r"([\d.+*/-]+)=\$?<<([^=>]+)=([^>]+)>>([\d,.]*\d)")


def compute(expression):
    """Value of an expression whose decimals are written as fractions of ten."""
    return evaluate_expression(re.sub(r"(\d+)\.(\d)", lambda m: f"({m[1]}{m[2]}/10)", expression))[0]


@pytest.mark.parametrize("split", FILES)
def test_every_annotation_computes(split):
    for line in FILES[split].read_text().splitlines():
        answer = json.loads(line)["answer"]
        steps = STEP.findall(answer)
        assert len(steps) == answer.count("<<") >= 1, answer
        for shown, expression, value, written in steps:
            assert shown == expression, answer
            assert compute(expression) == Fraction(value) == parse_number(written), answer
        assert parse_number(answer.rpartition("#### ")[2]) == Fraction(steps[-1][2]), answer


@pytest.mark.parametrize("split", FILES)
def test_first_operands_come_from_the_question_or_an_earlier_step(split):
    """A number nobody mentioned is a slip, apart from the few that everybody knows (days, grams, halves, hundredths)."""
    known = {"2", "3", "4", "5", "7", "8", "100", "1000"}
    for line in FILES[split].read_text().splitlines():
        row = json.loads(line)
        seen = set(re.findall(r"\d+(?:\.\d+)?", row["question"].replace(",", ""))) | known
        for _, expression, value, _ in STEP.findall(row["answer"]):
            assert set(re.findall(r"\d+(?:\.\d+)?", expression)) <= seen, (row["question"], expression)
            seen.add(value)


def test_sizes_and_splits():
    found = take_in(TaskConfig(train_file=str(FILES["train"]), eval_file=str(FILES["test"])))
    assert set(found.dropped.values()) == {0}
    sizes = {split: len(problems) for split, problems in found.problems.items()}
    assert sizes["test"] == 16
    assert sizes["train"] + sizes["val"] == 40
    assert sizes["val"] >= 2
