"""The audit log: every field of the record, whole groups of a training step, every sample of an evaluation."""

import json
import math
from types import SimpleNamespace

import pytest

from mcore_rl.audit import AuditContext, audit_record, audited_groups, failure_class
from mcore_rl.auditing import audit_step, auditor
from mcore_rl.config.schema import RunConfig, TaskConfig
from mcore_rl.data.build import build_task
from mcore_rl.data.tokenizer import build_tokenizer
from mcore_rl.evaluate import EvalSpec, evaluate
from mcore_rl.telemetry.audit_log import AuditLog
from mcore_rl.types import Completion, Score

TOKENIZER = build_tokenizer()
TASK = build_task(TaskConfig(), TOKENIZER, seed=0)
# Table 83.1 and chapter 38 of the book, besides run-time facts of this stack.
TABLE = """
run_id step sample_id dataset prompt_hash completion_text tool_calls tool_responses_digest reward_total
reward_components correct f1 em grounded num_queries redundancy format_error parse_error truncated
reward_version parser_version qid queries num_tool_calls turns retrieved_doc_ids grounding failure_class
weight_version finish_reason n_tokens sampler_logprob_mean_nats sampler_logprob_min_nats delta_max_abs_nats
group_id
"""
FIELDS = set(TABLE.split())


def answered(prompt, text, index=0, *, stopped=True):
    ids = TOKENIZER.encode(text, add_special_tokens=False) + ([2] if stopped else [])
    reason = "stop" if stopped else "length"
    return Completion(prompt.prompt_id, index, prompt.token_ids, tuple(ids), (-0.5,) * (len(ids) - 1) + (-1.5,), reason, 3)


def record(text, *, stopped=True, measured=None):
    prompt = TASK.prompts(0, 1)[0]
    completion = answered(prompt, text.replace("RIGHT", prompt.answer), stopped=stopped)
    context = AuditContext("mine", "arithmetic", "train", 7, "1/goal", TASK.grader.mode)
    score = TASK.score(prompt, completion)
    return audit_record(context, TASK, prompt=prompt, completion=completion, score=score, measured=measured)


def test_a_record_has_every_field():
    found = record(r"\boxed{RIGHT}", measured={"advantage": 0.5, "delta_max_abs_nats": 1e-6})
    assert set(found) >= FIELDS
    json.dumps(found, allow_nan=False)
    assert found["completion_text"].startswith(r"\boxed{") and "<|im_end|>" not in found["completion_text"]
    assert (found["reward_total"], found["correct"], found["em"], found["f1"]) == (1.0, True, 1.0, 1.0)
    assert (found["format_error"], found["parse_error"], found["truncated"], found["failure_class"]) == (
        False,
        False,
        False,
        "none",
    )
    assert (found["run_id"], found["step"], found["weight_version"], found["n_tokens"]) == ("mine", 7, 3, 6)
    assert found["sampler_logprob_mean_nats"] == pytest.approx((-0.5 * 5 - 1.5) / 6)
    assert found["sampler_logprob_min_nats"] == -1.5
    assert (found["advantage"], found["delta_max_abs_nats"]) == (0.5, 1e-6)
    assert (found["turns"], found["num_tool_calls"], found["tool_calls"], found["grounded"]) == (1, 0, [], None)


@pytest.mark.parametrize(
    ("text", "stopped", "expected"),
    [
        (r"\boxed{77}", True, ("wrong", False, False)),
        ("77", True, ("format", True, True)),
        (r"\boxed{RIGHT}", False, ("truncated", True, False)),
    ],
)
def test_silent_failures_are_told_apart(text, stopped, expected):
    found = record(text, stopped=stopped)
    assert (found["failure_class"], found["format_error"], found["parse_error"]) == expected
    assert failure_class(Score(math.nan, True, None, True, False, failure="timeout")) == "reward_timeout"


def test_the_same_prompt_has_one_hash_and_another_has_another():
    first, again = record(r"\boxed{1}"), record(r"\boxed{2}")
    assert first["prompt_hash"] == again["prompt_hash"] and first["qid"] == again["qid"]
    prompt = TASK.prompts(0, 2)[1]
    context = AuditContext("mine", "arithmetic", "train", 7, "1/goal", TASK.grader.mode)
    completion = answered(prompt, r"\boxed{1}")
    other = audit_record(context, TASK, prompt=prompt, completion=completion, score=TASK.score(prompt, completion))
    assert other["prompt_hash"] != first["prompt_hash"]


def test_whole_groups_are_drawn_by_seed_and_step_not_by_order():
    names = [f"p{i}" for i in range(20) for _ in range(4)]
    chosen = audited_groups(names, 5, seed=1, step=2)
    assert len(chosen) == 5
    assert chosen == audited_groups(names[::-1], 5, seed=1, step=2)
    assert chosen != audited_groups(names, 5, seed=1, step=3)
    assert audited_groups(names, 50, seed=1, step=2) == set(names)


def run_with(tmp_path, groups):
    config = RunConfig(name="mine")
    config.telemetry.audited_groups = groups
    log = AuditLog(tmp_path / "audit.jsonl")
    return SimpleNamespace(
        config=config, audit=log, task=TASK, reward_version="1/goal", extraction=TASK.grader.mode, log_rows=[{}, {}]
    )


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def test_a_training_step_is_sampled_by_group_and_says_what_it_left_out(tmp_path):
    run = run_with(tmp_path, 2)
    prompts = TASK.prompts(0, 3)
    completions = [answered(prompt, r"\boxed{1}", index) for prompt in prompts for index in range(2)]
    scores = [TASK.score(prompts[i // 2], completion) for i, completion in enumerate(completions)]
    records = [{"advantage": 0.0, "delta_max_abs_nats": math.nan, "other": 1}] * 6
    audit_step(run, 4, SimpleNamespace(prompts=prompts, completions=completions, scores=scores), records)
    run.audit.close()
    run.audit.close()
    *found, last = lines(tmp_path)
    assert len(found) == 4
    assert all(row["step"] == 4 and row["phase"] == "train" and row["delta_max_abs_nats"] == "NaN" for row in found)
    assert last == {"records_left_out": {"train": 2}}


class Engine:
    name, version = "scripted", 3

    def generate(self, prompts, sampling):
        return [answered(prompt, r"\boxed{1}") for prompt in prompts]


def test_an_evaluation_is_audited_in_full(tmp_path):
    run = run_with(tmp_path, 1)
    spec = EvalSpec("test", 12, 0.0, 32, (2,), TASK.grader.mode, reward_version="1/goal")
    result = evaluate(TASK, Engine(), spec, observe=auditor(run, "test/greedy"))
    run.audit.close()
    found = lines(tmp_path)
    assert len(found) == 12
    assert {row["phase"] for row in found} == {"test/greedy"}
    assert sum(row["correct"] for row in found) == sum(result.correct)
    assert result.reward_version == "1/goal"
    run.audit = None
    assert auditor(run, "test/greedy") is None
