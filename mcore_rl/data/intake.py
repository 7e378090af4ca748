"""From the rows of files to the splits of a task: every question once, none on both sides, what was left out counted.

Two questions are the same when they differ in white space and case only. The first occurrence stays; with a different
answer the question is unusable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mcore_rl.config.schema import BadRows, Overlap, TaskConfig
from mcore_rl.data.file_reader import read_file
from mcore_rl.data.problem import Problem
from mcore_rl.data.splits import SPLITS, split_of
from mcore_rl.rewards.values import parse_number


@dataclass(frozen=True)
class Intake:
    """Problems by split; dropped: rows left out, by reason (all reasons present, so that 0 is a statement)."""

    problems: dict[str, list[Problem]]
    dropped: dict[str, int]


@dataclass(frozen=True)
class Unique:
    """Problems, each question once. duplicates: rows left out because an equal one came before; conflicts: rows of
    questions that have more than one answer."""

    problems: list[Problem]
    duplicates: int
    conflicts: int


def take_in(config: TaskConfig) -> Intake:
    """Read task.train_file and task.eval_file and split them.

    ValueError: an unusable row (task.bad_rows=refuse), a training question in the evaluation file (task.overlap=refuse).
    """
    if config.train_file is None:
        raise ValueError("task.train_file is not set: task.kind=file needs a JSONL or parquet file")
    skip = config.bad_rows is BadRows.skip
    train, bad_train = _read(config.train_file, "task.train_file", skip=skip)
    if config.eval_file is None:
        return Intake(by_hash(train.problems), {**_counts(train, bad_train), "overlap_questions": 0})
    held_out, bad_eval = _read(config.eval_file, "task.eval_file", skip=skip)
    problems, overlap = with_held_out(train.problems, held_out.problems, config.overlap)
    dropped = Counter(_counts(train, bad_train))
    dropped.update(_counts(held_out, bad_eval))
    return Intake(problems, {**dropped, "overlap_questions": overlap})


def normal_form(question: str) -> str:
    """What two questions are compared by: white space collapsed, case folded."""
    return " ".join(question.split()).casefold()


def unique(problems: Sequence[Problem], key: str, *, skip_conflicts: bool) -> Unique:
    """Each question once, in order of first appearance.

    ValueError naming `key` and the question that has two answers, unless skip_conflicts leaves all its rows out.
    """
    rows: dict[str, list[Problem]] = {}
    for problem in problems:
        rows.setdefault(normal_form(problem.question), []).append(problem)
    torn = {name: same for name, same in rows.items() if not all(_same_answer(same[0], other) for other in same)}
    if torn and not skip_conflicts:
        first = next(iter(torn.values()))
        answers = sorted({problem.answer for problem in first})
        raise ValueError(
            f"{key}: {len(torn)} questions have more than one answer, for example {first[0].question!r}: {answers}; "
            "correct the file or use task.bad_rows=skip"
        )
    kept = [same[0] for name, same in rows.items() if name not in torn]
    conflicts = sum(map(len, torn.values()))
    return Unique(kept, len(problems) - len(kept) - conflicts, conflicts)


def by_hash(problems: Sequence[Problem]) -> dict[str, list[Problem]]:
    """The splits of one file: each question where its hash puts it."""
    return {split: [p for p in problems if split_of(p.question) == split] for split in SPLITS}


def with_held_out(
    train: Sequence[Problem], held_out: Sequence[Problem], overlap: Overlap
) -> tuple[dict[str, list[Problem]], int]:
    """Splits where the evaluation file is test and the hash only sets val apart, and how many training questions were
    taken out because they are in test.

    ValueError when there is one and `overlap` refuses it.
    """
    test = {normal_form(problem.question) for problem in held_out}
    shared = [problem.question for problem in train if normal_form(problem.question) in test]
    if shared and overlap is Overlap.refuse:
        raise ValueError(
            f"task.eval_file: {len(shared)} of its questions are in task.train_file too, for example {min(shared)!r}; "
            "task.overlap=drop takes them out of training"
        )
    left = [problem for problem in train if normal_form(problem.question) not in test]
    val = [problem for problem in left if split_of(problem.question) == "val"]
    rest = [problem for problem in left if split_of(problem.question) != "val"]
    return {"train": rest, "val": val, "test": list(held_out)}, len(shared)


def _read(path: str, key: str, *, skip: bool) -> tuple[Unique, int]:
    """Unique problems of a file, and how many of its rows were unusable."""
    try:
        rows = read_file(path, skip_bad=skip)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    return unique(rows.problems, key, skip_conflicts=skip), len(rows.bad_rows)


def _counts(found: Unique, bad_rows: int) -> dict[str, int]:
    return {"bad_rows": bad_rows, "duplicate_rows": found.duplicates, "conflicting_rows": found.conflicts}


def _same_answer(one: Problem, other: Problem) -> bool:
    left, right = parse_number(one.answer), parse_number(other.answer)
    return one.answer == other.answer if left is None or right is None else left == right
