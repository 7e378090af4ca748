"""One step as numbers (metric name -> value) and as rollout records."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_rl.algorithms.group_stats import group_statistics
from mcore_rl.batching import RolloutBatch, scored_positions
from mcore_rl.config.algorithm import AlgorithmConfig, Clip, RatioLevel
from mcore_rl.rewards.statistics import component_statistics, failure_counts
from mcore_rl.telemetry.mismatch import delta_statistics, outside_clip_frac
from mcore_rl.types import Completion, Prompt, RoutingLayer, Score, SyncReport, TrainBatch, UpdateReport

Metrics = dict[str, float | list[float]]


@dataclass(frozen=True)
class StepOutcome:
    """Everything one step produced. `updates` and `reports` line up; `scores` are the task's, before any control."""

    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    scores: Sequence[Score]
    rollout: RolloutBatch
    updates: Sequence[TrainBatch]
    reports: Sequence[UpdateReport]
    synced: SyncReport


def step_metrics(outcome: StepOutcome, seconds: Mapping[str, float], algorithm: AlgorithmConfig | None = None) -> Metrics:
    """All metrics of a step. Group statistics are on the task reward, before any filter or control.

    algorithm: its clip tells which share of the ratios the mismatch alone would clip; not logged without it.
    """
    metrics: Metrics = {"version": float(outcome.synced.version)}
    metrics.update(_group_metrics(outcome))
    metrics.update(_response_metrics(outcome))
    metrics.update(outcome.rollout.facts)
    metrics.update(_delta_metrics(outcome, algorithm))
    metrics.update(_update_metrics(outcome.reports))
    metrics.update(_routing_metrics(outcome.reports[0].routing))
    metrics.update(_sync_metrics(outcome.synced))
    metrics.update({f"seconds/{name}": value for name, value in seconds.items()})
    return metrics


def old_logprobs(update: TrainBatch, report: UpdateReport) -> tuple[Tensor, ...]:
    """The trainer's log-probs at the weights that sampled the update: its own forward's where it was its own `old`."""
    return report.values.logprobs if update.old_logprobs is None else update.old_logprobs


def _group_metrics(outcome: StepOutcome) -> dict[str, float]:
    """Over the samples that have a reward; how many have none, and why, stands beside it."""
    kept, rollout = scored_positions(outcome.scores), outcome.rollout
    found = group_statistics(
        [outcome.scores[i].reward for i in kept],
        [outcome.scores[i].correct for i in kept],
        [rollout.prompt_ids[i] for i in kept],
        [rollout.tokens.sample_ids[i] for i in kept],
    )
    return {**found, **failure_counts(outcome.scores), **component_statistics([outcome.scores[i] for i in kept])}


def _response_metrics(outcome: StepOutcome) -> dict[str, float]:
    count = len(outcome.scores)
    lengths = sorted(len(completion.token_ids) for completion in outcome.completions)
    correct = sum(score.correct for score in outcome.scores)
    return {
        "format_frac": sum(score.format_ok for score in outcome.scores) / count,
        "extract_frac": sum(score.extracted is not None for score in outcome.scores) / count,
        "resp_trunc_frac": sum(score.truncated for score in outcome.scores) / count,
        "resp_len_mean_tokens": sum(lengths) / count,
        "resp_len_p50_tokens": float(lengths[count // 2]),
        "tokens_per_correct": sum(lengths) / correct if correct else math.inf,
        "duplicate_prompts": float(len(outcome.prompts) - len({prompt.question for prompt in outcome.prompts})),
        "drop/zero_variance_groups": float(outcome.rollout.advantages.zero_variance_groups),
        "drop/singleton_groups": float(outcome.rollout.advantages.singleton_groups),
    }


def _delta_metrics(outcome: StepOutcome, algorithm: AlgorithmConfig | None) -> dict[str, float]:
    old: list[Tensor] = []
    sampler: list[Tensor] = []
    mask: list[Tensor] = []
    for update, report in zip(outcome.updates, outcome.reports, strict=True):
        if update.sampler_logprobs is None:
            raise ValueError("an update lost its sampler log-probs; delta cannot be measured")
        old.extend(old_logprobs(update, report))
        sampler.extend(update.sampler_logprobs)
        mask.extend(update.tokens.loss_mask)
    found = delta_statistics(old, sampler, mask)
    if algorithm is None or algorithm.clip not in (Clip.two_sided, Clip.dual):
        return found
    per_sequence = algorithm.ratio_level is not RatioLevel.token
    band = (algorithm.clip_low, algorithm.clip_high)
    return {**found, "mismatch_outside_clip_frac": outside_clip_frac(old, sampler, mask, band, per_sequence=per_sequence)}


def _update_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for index, report in enumerate(reports):
        metrics[f"loss/update_{index}"] = report.loss
        metrics[f"grad_norm/update_{index}"] = report.grad_norm
        metrics.update({f"{name}/update_{index}": value for name, value in report.metrics.items() if name not in _SHARED})
    for name in _SHARED:
        values = [report.metrics[name] for report in reports if name in report.metrics]
        if values:
            metrics[name] = values[0]
    return metrics


_SHARED = ("policy_entropy_nats", "lr")


def _routing_metrics(layers: Sequence[RoutingLayer]) -> Metrics:
    metrics: Metrics = {}
    for layer in layers:
        metrics[f"router_entropy_nats/layer_{layer.layer}"] = layer.router_entropy_nats
        metrics[f"expert_load/layer_{layer.layer}"] = list(layer.load_E)
        metrics[f"load_max_over_mean/layer_{layer.layer}"] = layer.max_over_mean_load
        metrics[f"dead_experts/layer_{layer.layer}"] = float(layer.dead_experts)
        metrics[f"topk_margin/layer_{layer.layer}"] = layer.topk_margin
        if layer.replayed_tokens:
            metrics[f"router_top1_flip/layer_{layer.layer}"] = layer.top1_flip
            metrics[f"router_topk_jaccard/layer_{layer.layer}"] = layer.topk_jaccard
    return metrics


def _sync_metrics(synced: SyncReport) -> dict[str, float]:
    return {
        "sync/tensors": float(synced.tensors),
        "sync/bytes": float(synced.bytes),
        "sync/buckets": float(synced.buckets),
        "sync/readback_tensors": float(synced.readback_tensors),
        "sync/probe_max_nats": synced.probe_max_nats,
        "sync/probe_mean_nats": synced.probe_mean_nats,
        "sync/floor_max_nats": synced.floor_max_nats,
        "sync/floor_mean_nats": synced.floor_mean_nats,
        **{f"sync_seconds/{name}": value for name, value in synced.seconds.items()},
    }


def rollout_records(outcome: StepOutcome) -> list[dict[str, object]]:
    """One JSON-able record per completion: what was asked, sampled, paid, and how far trainer and sampler are apart.

    delta is NaN for a completion that was in no update or has no trained token.
    """
    gaps = _delta_by_sample(outcome)
    questions = {prompt.prompt_id: prompt for prompt in outcome.prompts}
    records: list[dict[str, object]] = []
    for index, (completion, score) in enumerate(zip(outcome.completions, outcome.scores, strict=True)):
        name = outcome.rollout.tokens.sample_ids[index]
        prompt = questions[completion.prompt_id]
        records.append(
            {
                "sample_id": name,
                "group_id": completion.prompt_id,
                "question": prompt.question,
                "answer": prompt.answer,
                "prompt_token_ids": list(completion.prompt_token_ids),
                "token_ids": list(completion.token_ids),
                "sampler_logprobs": list(completion.logprobs),
                "finish_reason": completion.finish_reason,
                "weight_version": completion.version,
                "reward": score.reward,
                "reward_failure": score.failure,
                "correct": score.correct,
                "extracted": score.extracted,
                "format_ok": score.format_ok,
                "truncated": score.truncated,
                "advantage": float(outcome.rollout.advantages.values[index]),
                "delta_max_abs_nats": gaps.get(name, math.nan),
            }
        )
    return records


def _delta_by_sample(outcome: StepOutcome) -> dict[str, float]:
    gaps: dict[str, float] = {}
    for update, report in zip(outcome.updates, outcome.reports, strict=True):
        old = old_logprobs(update, report)
        for index, name in enumerate(update.tokens.sample_ids):
            sampler = update.sampler_logprobs[index] if update.sampler_logprobs else torch.full_like(old[index], math.nan)
            gap = (old[index] - sampler)[update.tokens.loss_mask[index]]
            gaps[name] = float(gap.abs().max()) if gap.numel() else math.nan
    return gaps
