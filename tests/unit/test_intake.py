"""Rows of files on their way in: bad ones, the same question twice, questions on both sides. Refused or counted."""

import json
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.reward import PartialCredit, RewardConfig
from mcore_rl.config.schema import BadRows, Overlap, TaskConfig, TaskKind
from mcore_rl.config.validate_reward import validate_task_fields
from mcore_rl.data.build import build_task
from mcore_rl.data.intake import take_in
from mcore_rl.data.tokenizer import build_tokenizer


def row(i, answer=None, question=None):
    return {"question": question or f"What is {i} + 1?", "answer": f"#### {i + 1 if answer is None else answer}"}


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def config(tmp_path, rows, held_out=None, **fields):
    train = write(tmp_path / "train.jsonl", rows)
    test = None if held_out is None else write(tmp_path / "test.jsonl", held_out)
    return TaskConfig(kind=TaskKind.file, train_file=train, eval_file=test, **fields)


def count(found):
    return sum(map(len, found.problems.values()))


def test_a_bad_row_is_refused_by_name_or_skipped_and_counted(tmp_path):
    rows = [row(0), "{", row(1), '{"question": "q"}', '{"question": "q", "answer": "seven"}', row(2)]
    with pytest.raises(ValueError, match=r"train\.jsonl:2: not a JSON object"):
        take_in(config(tmp_path, rows))
    found = take_in(config(tmp_path, rows, bad_rows=BadRows.skip))
    assert count(found) == 3
    assert found.dropped == {"bad_rows": 3, "duplicate_rows": 0, "conflicting_rows": 0, "overlap_questions": 0}


def test_a_line_that_is_no_utf8_is_a_bad_row(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(json.dumps(row(0)).encode() + b'\n{"question": "\xff\xfe"}\n' + json.dumps(row(1)).encode() + b"\n")
    with pytest.raises(ValueError, match=r"train\.jsonl:2: not UTF-8"):
        take_in(TaskConfig(kind=TaskKind.file, train_file=str(path)))
    found = take_in(TaskConfig(kind=TaskKind.file, train_file=str(path), bad_rows=BadRows.skip))
    assert (count(found), found.dropped["bad_rows"]) == (2, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a \\ud800 b", "answer": "#### 1"}', "key 'question' has half of a surrogate pair"),
        ('{"question": "a", "answer": "\\udfff #### 1"}', "key 'answer' has half of a surrogate pair"),
        ('{"question": 1' + "1" * 5_000 + ', "answer": "#### 1"}', "not a JSON object: Exceeds the limit"),
        ('{"question": ' + "[" * 100_000, "not a JSON object: maximum recursion"),
        ('{"question": "a", "answer": "#### 1,2"}', "key 'answer' must end in '#### n'"),
    ],
)
def test_a_row_that_no_reader_can_use_is_a_bad_row(tmp_path, line, message):
    rows = [row(0), line, row(1)]
    with pytest.raises(ValueError, match=rf"train\.jsonl:2: {message}"):
        take_in(config(tmp_path, rows))
    found = take_in(config(tmp_path, rows, bad_rows=BadRows.skip))
    assert (count(found), found.dropped["bad_rows"]) == (2, 1)


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row(i)) + "\n" for i in range(2)), encoding="utf-8-sig")
    assert count(take_in(TaskConfig(kind=TaskKind.file, train_file=str(path)))) == 2


def test_a_name_that_no_file_can_have_is_refused():
    with pytest.raises(ValueError, match=r"task\.train_file: task file x+\.jsonl: cannot be read: File name too long"):
        take_in(TaskConfig(kind=TaskKind.file, train_file="x" * 300 + ".jsonl"))


def test_a_text_in_parquet_that_is_no_utf8_is_a_bad_row(tmp_path):
    data = [b"What is 1 + 1?", b"a\xff", b"What is 2 + 1?"]
    offsets = struct.pack("<4i", 0, *(sum(map(len, data[: i + 1])) for i in range(3)))
    questions = pa.Array.from_buffers(pa.string(), 3, [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(data))])
    path = tmp_path / "train.parquet"
    pq.write_table(pa.table({"question": questions, "answer": ["#### 2", "#### 1", "#### 3"]}), path)
    with pytest.raises(ValueError, match=r"train\.parquet:2: not UTF-8: .* at byte 1"):
        take_in(TaskConfig(kind=TaskKind.file, train_file=str(path)))
    found = take_in(TaskConfig(kind=TaskKind.file, train_file=str(path), bad_rows=BadRows.skip))
    assert (count(found), found.dropped["bad_rows"]) == (2, 1)


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [row(i) for i in range(30)]
    pq.write_table(pa.table({key: [row[key] for row in rows] for key in ("question", "answer")}), path)
    damaged = bytearray(path.read_bytes())
    damaged[20:200] = bytes(value ^ 0xFF for value in damaged[20:200])
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"task\.train_file: task file .*train\.parquet: "):
        take_in(TaskConfig(kind=TaskKind.file, train_file=str(path)))


def test_nothing_but_bad_rows_is_an_error_in_either_mode(tmp_path):
    with pytest.raises(ValueError, match=r"no prompts left; first bad row: .*train\.jsonl:1"):
        take_in(config(tmp_path, ["{", "{"], bad_rows=BadRows.skip))


def test_a_question_given_twice_counts_once(tmp_path):
    """The second and third differ in white space and case only, and in how the number is written."""
    rows = [row(0), row(1), row(0), row(0, question="what  is 0 + 1?", answer="1.0")]
    found = take_in(config(tmp_path, rows))
    assert count(found) == 2
    assert found.dropped["duplicate_rows"] == 2


def test_a_question_with_two_answers_is_refused_or_left_out(tmp_path):
    rows = [row(0), row(1), row(0, answer=7), row(0)]
    with pytest.raises(
        ValueError, match=r"task\.train_file: 1 questions have more than one answer.*'What is 0 \+ 1\?': \['1', '7'\]"
    ):
        take_in(config(tmp_path, rows))
    found = take_in(config(tmp_path, rows, bad_rows=BadRows.skip))
    assert count(found) == 1
    assert found.dropped["conflicting_rows"] == 3


def test_a_training_question_that_is_in_the_test_file_is_refused_or_taken_out(tmp_path):
    rows, held_out = [row(i) for i in range(20)], [row(3, question="WHAT is 3 + 1?"), row(50), row(5)]
    with pytest.raises(ValueError, match=r"task\.eval_file: 2 of its questions are in task\.train_file too"):
        take_in(config(tmp_path, rows, held_out))
    found = take_in(config(tmp_path, rows, held_out, overlap=Overlap.drop))
    assert found.dropped["overlap_questions"] == 2
    assert len(found.problems["test"]) == 3
    trained = {p.question for p in found.problems["train"] + found.problems["val"]}
    assert trained == {f"What is {i} + 1?" for i in range(20) if i not in (3, 5)}


def test_bad_rows_of_both_files_add_up(tmp_path):
    found = take_in(config(tmp_path, [row(0), "{", row(0)], [row(9), "[", "1"], bad_rows=BadRows.skip))
    assert found.dropped == {"bad_rows": 3, "duplicate_rows": 1, "conflicting_rows": 0, "overlap_questions": 0}


def test_what_was_left_out_goes_on_record(tmp_path):
    made = build_task(config(tmp_path, [row(i) for i in range(30)] + [row(0)]), build_tokenizer(), seed=0)
    facts = made.facts()
    assert sum(facts["problems"].values()) == 30
    assert facts["dropped"]["duplicate_rows"] == 1
    assert facts["dropped"]["too_long_prompts"] == 0


@pytest.mark.parametrize(
    ("task", "reward", "message"),
    [
        (TaskConfig(bad_rows=BadRows.skip), RewardConfig(), "task.bad_rows=skip: is read with task.kind=file only"),
        (TaskConfig(overlap=Overlap.drop), RewardConfig(), "task.overlap=drop: is read with task.kind=file only"),
        (TaskConfig(band_any_model=True), RewardConfig(), "task.band_any_model=true: is read with task.band_file only"),
        (
            TaskConfig(kind=TaskKind.countdown),
            RewardConfig(partial_credit=PartialCredit.token_f1),
            "reward.partial_credit=token_f1",
        ),
    ],
)
def test_keys_that_would_not_be_read_are_refused(task, reward, message):
    with pytest.raises(ValueError, match=message):
        validate_task_fields(task, reward)
