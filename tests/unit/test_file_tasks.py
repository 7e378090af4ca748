"""Tasks from files: splits, epochs, demonstrations, rows and files that cannot be used."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mcore_rl.config.schema import TaskConfig, TaskKind
from mcore_rl.data.build import build_task
from mcore_rl.data.splits import split_of
from mcore_rl.data.tokenizer import build_tokenizer
from mcore_rl.types import Completion

TOKENIZER = build_tokenizer()


def decode(ids):
    return TOKENIZER.decode(list(ids))


def answer(prompt, text):
    ids = (*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id)
    return Completion(prompt.prompt_id, 0, prompt.token_ids, ids, (0.0,) * len(ids), "stop", 0)


def rows(count, start=0):
    return [
        {"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"}
        for i in range(start, start + count)
    ]


def write(path, made):
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return str(path)


def file_task(path, **fields):
    return build_task(TaskConfig(kind=TaskKind.file, train_file=path, require_full_format=False, **fields), TOKENIZER, seed=0)


def test_file_task_splits_and_epochs(tmp_path):
    made = file_task(write(tmp_path / "t.jsonl", rows(200)))
    sizes = {split: len(problems) for split, problems in made.problems.items()}
    assert sum(sizes.values()) == 200
    assert all(split_of(p.question) == split for split, problems in made.problems.items() for p in problems)
    train = sizes["train"]
    epoch = [p.question for step in range(train) for p in made.prompts(step, 1)]
    assert len(set(epoch)) == train
    assert epoch != [p.question for step in range(train, 2 * train) for p in made.prompts(step, 1)]
    assert made.prompts(3, 8) == made.prompts(3, 8)
    assert len({p.question for p in made.eval_prompts("test", sizes["test"])}) == sizes["test"]
    with pytest.raises(ValueError, match="no prompts left"):
        made.eval_prompts("val", sizes["val"] + 1)


def test_file_demonstrations_and_scores(tmp_path):
    made = file_task(write(tmp_path / "t.jsonl", rows(50)))
    prompt, ids = made.demonstrations(0, 1)[0]
    n = int(prompt.answer)
    assert decode(ids) == f"{n - 1}+1={n}\n\\boxed{{{n}}}<|im_end|>"
    assert made.score(prompt, answer(prompt, f"It is \\boxed{{{n}.0}} I think")).reward == 1.0
    assert made.score(prompt, answer(prompt, f"It is {n}")).extracted is None


def test_parquet_equals_jsonl(tmp_path):
    pq.write_table(pa.Table.from_pylist(rows(30)), tmp_path / "t.parquet")
    parquet, jsonl = file_task(str(tmp_path / "t.parquet")), file_task(write(tmp_path / "t.jsonl", rows(30)))
    assert parquet.prompts(0, 8) == jsonl.prompts(0, 8)


def test_a_separate_evaluation_file(tmp_path):
    train, held = write(tmp_path / "t.jsonl", rows(100)), write(tmp_path / "e.jsonl", rows(7, start=1000))
    made = file_task(train, eval_file=held)
    assert {p.question for p in made.eval_prompts("test", 7)} == {row["question"] for row in rows(7, start=1000)}
    with pytest.raises(ValueError, match=r"task\.eval_file: 5 of its questions"):
        file_task(train, eval_file=write(tmp_path / "o.jsonl", rows(5)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"t\.jsonl:3: not a JSON object"),
        ("[1]", r"t\.jsonl:3: list where an object"),
        ('{"answer": "#### 1"}', r"t\.jsonl:3: key 'question' is missing"),
        ('{"question": "q"}', r"t\.jsonl:3: key 'answer' is missing"),
        ('{"question": "q", "answer": 3}', r"t\.jsonl:3: key 'answer' is 3"),
        ('{"question": " ", "answer": "#### 1"}', r"t\.jsonl:3: key 'question'"),
        ('{"question": "q", "answer": "it is 3"}', r"t\.jsonl:3: key 'answer' must end in '#### n'"),
    ],
)
def test_malformed_rows_name_file_line_and_key(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(2)) + line + "\n")
    with pytest.raises(ValueError, match=message):
        file_task(str(path))


def test_file_errors(tmp_path):
    (tmp_path / "e.jsonl").write_text("\n")
    (tmp_path / "e.csv").write_text("a")
    (tmp_path / "e.parquet").write_text("a")
    for name, message in [
        ("no.jsonl", "no such file"),
        ("e.jsonl", "empty"),
        ("e.csv", r"'\.csv'"),
        ("e.parquet", "not a parquet"),
    ]:
        with pytest.raises(ValueError, match=message):
            file_task(str(tmp_path / name))


def test_prompts_too_long_are_dropped_and_counted(tmp_path):
    made = rows(60)
    made[0]["question"] += " long" * 50
    while split_of(made[0]["question"].strip()) != "train":
        made[0]["question"] += "!"
    config = TaskConfig(kind=TaskKind.file, train_file=write(tmp_path / "t.jsonl", made))
    kept = build_task(config, TOKENIZER, seed=0, max_prompt_tokens=60)
    assert kept.dropped == 1
    assert max(len(p.token_ids) for p in kept.prompts(0, 100)) <= 60
    with pytest.raises(ValueError, match="no prompts left for training"):
        build_task(config, TOKENIZER, seed=0, max_prompt_tokens=3)
