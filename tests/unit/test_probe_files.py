"""Band and probe files that are damaged, or that are of other data than the task they are given to."""

import json
from dataclasses import asdict, replace

import pytest

from mcore_rl.config.compose import compose_config
from mcore_rl.config.reward import DataGateConfig
from mcore_rl.config.schema import TaskConfig, TaskKind
from mcore_rl.config.validate import validate
from mcore_rl.config.validate_reward import validate_data_gate
from mcore_rl.data.band_file import Band, BandRow, Conditions, read_band, write_band
from mcore_rl.data.band_task import rendering_sha256
from mcore_rl.data.build import build_task
from mcore_rl.data.tokenizer import build_tokenizer
from mcore_rl.data_gate import PassRate
from mcore_rl.probe_file import check_same_prompts, earlier_rows, read_probe
from mcore_rl.telemetry.jsonl import dump_line

TOKENIZER = build_tokenizer()
CONDITIONS = Conditions("arithmetic", 0, "boxed/full/v1", "r", "d", 4, 1.0, 32)
ROW = BandRow("probe-p0", "1+1", "2", 4, 2)
RATE = PassRate("probe-p0", "1+1", "2", 4, 2, 3, 0, 0)


def task(**fields):
    return build_task(TaskConfig(**fields), TOKENIZER, seed=0)


def band_of(made, *rows, kind="arithmetic"):
    known = replace(CONDITIONS, task=kind, extraction=made.grader.mode, rendering_sha256=rendering_sha256(made.renderer))
    return Band(known, 0.2, 0.8, 10, 5, rows)


def first_row(made):
    (prompt,) = made.probe_prompts(0, 1)
    return BandRow(prompt.prompt_id, prompt.question, prompt.answer, 4, 2)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (replace(ROW, correct=40), "line 3: 40 correct of 4 samples cannot be"),
        (replace(ROW, correct=-1), "line 3: -1 correct of 4 samples cannot be"),
        (replace(ROW, samples=0, correct=0), "line 3: 0 correct of 0 samples cannot be"),
        (replace(ROW, correct=4), r"line 3: 4 of 4 correct is outside the band 0\.2 to 0\.8"),
        (ROW, "line 3: question '1\\+1' is in line 2 already"),
        (replace(ROW, answer=2), "line 3: key 'answer' is 2; a text is needed"),
        (replace(ROW, correct="2"), "line 3: key 'correct' is '2'; a whole number is needed"),
        (replace(ROW, correct=True), "line 3: key 'correct' is True; a whole number is needed"),
    ],
)
def test_a_band_row_that_cannot_be_is_named_with_its_line(tmp_path, row, message):
    other = row if row == ROW else replace(row, question="2+2")
    write_band(tmp_path / "band.jsonl", Band(CONDITIONS, 0.2, 0.8, 10, 5, (ROW, other)))
    with pytest.raises(ValueError, match=rf"task\.band_file=.*band\.jsonl, {message}"):
        read_band(tmp_path / "band.jsonl")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"low": "a"}, "line 1: key 'low' is 'a'; a finite number is needed"),
        ({"conditions": None}, "line 1: key 'conditions': NoneType where an object is needed"),
        ({"conditions": {"task": "x"}}, "line 1: key 'conditions': missing keys"),
    ],
)
def test_a_damaged_first_line_of_a_band_is_named(tmp_path, changed, message):
    path = tmp_path / "band.jsonl"
    write_band(path, Band(CONDITIONS, 0.2, 0.8, 10, 5, (ROW,)))
    head, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(head), **changed}) + "\n" + rest)
    with pytest.raises(ValueError, match=message):
        read_band(path)


@pytest.mark.parametrize("text", ["[]\n", "1\n", "null\n"])
def test_a_line_that_is_no_object_is_named_by_both_readers(tmp_path, text):
    path = tmp_path / "band.jsonl"
    path.write_text(text)
    for read in (read_band, lambda path: read_probe(str(path))):
        with pytest.raises(ValueError, match=r"band\.jsonl, line 1: \w+ where an object is needed"):
            read(path)


@pytest.mark.parametrize(
    "question", [f"What is{mark}1+1?" for mark in ("\u2028", "\u2029", "\x85", "\x0b")] + ["NaN", "Infinity"]
)
def test_questions_come_back_as_they_were_written(tmp_path, question):
    write_band(tmp_path / "band.jsonl", Band(CONDITIONS, 0.2, 0.8, 10, 5, (replace(ROW, question=question),)))
    assert read_band(tmp_path / "band.jsonl").rows[0].question == question
    lines = [{"format": 1, "conditions": asdict(CONDITIONS)}, asdict(replace(RATE, question=question))]
    (tmp_path / "probe.jsonl").write_text("".join(dump_line(line) + "\n" for line in lines), encoding="utf-8")
    assert earlier_rows(str(tmp_path / "probe.jsonl"), CONDITIONS)[0].question == question


@pytest.mark.parametrize("fields", [{}, {"kind": TaskKind.countdown, "numbers": 4}, {"kind": TaskKind.file}])
def test_a_band_with_another_answer_is_refused(tmp_path, fields):
    path = tmp_path / "band.jsonl"
    if fields.get("kind") is TaskKind.file:
        rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(30)]
        (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {**fields, "train_file": str(tmp_path / "t.jsonl")}
    made, kind = task(**fields), fields.get("kind", TaskKind.arithmetic).value
    row = first_row(made)
    write_band(path, band_of(made, row, kind=kind))
    assert task(**fields, band_file=str(path)).prompts(0, 1)[0].answer == row.answer
    write_band(path, band_of(made, replace(row, answer="1000"), kind=kind))
    with pytest.raises(
        ValueError, match=rf"task\.band_file=.*, line 2: the answer to .* is '1000' there and '{row.answer}' in this"
    ):
        task(**fields, band_file=str(path))


def test_a_band_of_another_difficulty_is_refused(tmp_path):
    made = task(min_terms=3, max_terms=3)
    write_band(tmp_path / "band.jsonl", band_of(made, first_row(made)))
    with pytest.raises(ValueError, match="1 of its questions are not training questions of this task"):
        task(band_file=str(tmp_path / "band.jsonl"))
    game = task(kind=TaskKind.countdown, numbers=4, max_number=50)
    write_band(tmp_path / "band.jsonl", band_of(game, first_row(game), kind="countdown"))
    with pytest.raises(ValueError, match="1 of its questions are not training questions of this task"):
        task(kind=TaskKind.countdown, numbers=3, band_file=str(tmp_path / "band.jsonl"))


@pytest.mark.parametrize("fields", [{"min_terms": 2, "max_terms": 9}, {"kind": TaskKind.countdown, "numbers": 4}])
def test_a_drawn_task_knows_the_answers_of_its_questions(fields):
    made = task(**fields)
    prompts = [prompt for step in range(20) for prompt in made.prompts(step, 10)]
    assert all(made.training_answer(prompt.question) == prompt.answer for prompt in prompts)
    assert not any(made.training_answer(text) for text in ("", "1", "5+9", "3 7 = ", "1+1?", "0 0 0 0 = 1", "1 2 3 4 = 1000"))


def test_pass_rates_of_other_data_are_not_taken_over():
    made = task()
    prompts = made.probe_prompts(0, 3)
    rows = [replace(RATE, prompt_id=p.prompt_id, question=p.question, answer=p.answer) for p in prompts]
    check_same_prompts("probe.jsonl", rows, prompts)
    for other in (replace(rows[1], question="9-9"), replace(rows[1], answer="77")):
        with pytest.raises(
            ValueError, match=r"data_gate\.append_to=probe\.jsonl, line 3: probe-p1 is .* there and .* in this task"
        ):
            check_same_prompts("probe.jsonl", [rows[0], other, rows[2]], prompts)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"format": 1}], "line 1: key 'conditions': NoneType where an object is needed"),
        ([{"format": 1, "conditions": {}}], "line 1: key 'conditions': missing keys"),
        ([{"format": 1, "conditions": asdict(CONDITIONS)}, {"prompt_id": "probe-p0"}], "line 2: missing keys"),
        ([{"format": 1, "conditions": asdict(CONDITIONS)}, {**asdict(RATE), "correct": "2"}], "line 2: key 'correct' is '2'"),
        ([{"format": 1, "conditions": asdict(CONDITIONS)}, {**asdict(RATE), "correct": 5}], "line 2: .* cannot be of 4 samples"),
        ([{"format": 1, "conditions": asdict(CONDITIONS)}, {**asdict(RATE), "samples": 8}], "line 2: .* cannot be of 4 samples"),
    ],
)
def test_a_damaged_probe_file_is_named_with_its_line(tmp_path, lines, message):
    path = tmp_path / "probe.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=rf"data_gate\.append_to=.*probe\.jsonl, {message}"):
        read_probe(str(path))


def test_an_earlier_probe_is_read_before_anything_starts(tmp_path):
    quick = ["experiment=quickstart", f"out_dir={tmp_path}", "data_gate.prompts=4", f"data_gate.append_to={tmp_path}/p.jsonl"]
    with pytest.raises(ValueError, match=r"data_gate\.append_to=.*p\.jsonl: no such file"):
        validate(compose_config(quick), "probe")
    lines = [{"format": 1, "conditions": asdict(CONDITIONS)}, asdict(RATE)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"p\.jsonl, line 2: probe-p0 is \('1\+1', '2'\) there"):
        validate(compose_config(quick), "probe")


def test_more_prompts_than_can_be_drawn_are_refused():
    with pytest.raises(ValueError, match=r"data_gate\.prompts=100000000: at most 100,000"):
        validate_data_gate(DataGateConfig(prompts=100_000_000))
