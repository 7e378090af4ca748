"""Audit records: what was asked, written, paid and why, with the versions of the code that judged it.

Every evaluation is audited in full; of a training step `telemetry.audited_groups` whole groups, drawn by (seed, step).
Fields of agents (tool calls, queries, retrieved documents, grounding, redundancy) are always there and empty or null
in tasks that have none.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mcore_rl.seams import Task
from mcore_rl.types import Completion, Prompt, Score

NO_TOOLS: dict[str, object] = {
    "turns": 1,
    "tool_calls": [],
    "num_tool_calls": 0,
    "tool_responses_digest": None,
    "queries": [],
    "num_queries": 0,
    "retrieved_doc_ids": [],
    "grounded": None,
    "grounding": None,
    "redundancy": None,
}


@dataclass(frozen=True)
class AuditContext:
    """What all records of one look have in common. phase: train, or the split and decoding of an evaluation.

    step: training steps done before these samples were drawn. parser_version: name of the extraction.
    """

    run_id: str
    dataset: str
    phase: str
    step: int
    reward_version: str
    parser_version: str


def failure_class(score: Score) -> str:
    """Why an answer earned nothing, in one word; `none` for a correct one."""
    if score.failure is not None:
        return f"reward_{score.failure}"
    if score.correct:
        return "none"
    if score.truncated:
        return "truncated"
    return "wrong" if score.format_ok else "format"


def audit_record(
    context: AuditContext,
    task: Task,
    *,
    prompt: Prompt,
    completion: Completion,
    score: Score,
    measured: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """One JSON-able record. measured: what training knows besides (advantage, delta between trainer and sampler)."""
    return {
        "run_id": context.run_id,
        "phase": context.phase,
        "step": context.step,
        "sample_id": completion.sample_id,
        "group_id": completion.prompt_id,
        "dataset": context.dataset,
        "qid": _sha256(prompt.question)[:16],
        "prompt_hash": _sha256(",".join(map(str, completion.prompt_token_ids))),
        "question": prompt.question,
        "answer": prompt.answer,
        "completion_text": task.text(completion),
        "extracted": score.extracted,
        "reward_total": score.reward,
        "reward_components": dict(score.components),
        "reward_failure": score.failure,
        "correct": score.correct,
        "em": float(score.correct),
        "f1": score.goal,
        "format_error": not score.format_ok,
        "parse_error": score.extracted is None,
        "truncated": score.truncated,
        "failure_class": failure_class(score),
        "reward_version": context.reward_version,
        "parser_version": context.parser_version,
        "weight_version": completion.version,
        "finish_reason": completion.finish_reason,
        "n_tokens": len(completion.token_ids),
        "sampler_logprob_mean_nats": sum(completion.logprobs) / len(completion.logprobs) if completion.logprobs else None,
        "sampler_logprob_min_nats": min(completion.logprobs, default=None),
        "advantage": None,
        "delta_max_abs_nats": None,
        **NO_TOOLS,
        **(measured or {}),
    }


def audited_groups(prompt_ids: Sequence[str], count: int, *, seed: int, step: int) -> frozenset[str]:
    """At most `count` of the groups, a function of (seed, step) and the prompt ids alone."""
    groups = sorted(set(prompt_ids))
    if len(groups) <= count:
        return frozenset(groups)
    return frozenset(random.Random(f"{seed}/{step}/audit").sample(groups, count))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
