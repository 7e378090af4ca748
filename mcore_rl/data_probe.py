"""The pass-rate probe inside a run: training prompts x n samples from the engine, written down prompt by prompt.

probe.jsonl   conditions, then one line per prompt, as soon as its samples are judged
band.jsonl    the prompts in the band, for task.band_file
probe.json    buckets, histogram, verdict of the launch rule
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mcore_rl.auditing import auditor
from mcore_rl.batching import check_completions
from mcore_rl.data.band_file import Band, BandRow, Conditions, write_band
from mcore_rl.data.band_task import rendering_sha256
from mcore_rl.data.build import BuiltTask
from mcore_rl.data_gate import GateSummary, PassRate, in_band, kill_reason, summarise_rates, table
from mcore_rl.engine_calls import ask_engine
from mcore_rl.probe_file import PROBE_FORMAT, check_same_prompts, earlier_rows
from mcore_rl.rewards.checks import score_completions
from mcore_rl.run import Run
from mcore_rl.run_folder import write_json
from mcore_rl.seams import RolloutEngine
from mcore_rl.stages import training_sampling
from mcore_rl.telemetry.jsonl import dump_line
from mcore_rl.types import Completion, Prompt, Score, StopRun
from parallel.collectives import on_rank0


def probe_pass_rates(run: Run, task: BuiltTask, model_digest: str) -> None:
    """Probe, write the three files, show the table. Collective. StopRun when the launch rule kills.

    model_digest: of the weights that the engine holds. Raises StaleRollout when it holds others.
    """
    config, version = run.config.data_gate, run.policy.weights().version
    conditions = probe_conditions(run, task, model_digest)
    rows = [PassRate(**row) for row in on_rank0(lambda: _begin(run, task, conditions))]
    for start in range(len(rows), config.prompts, config.prompts_per_request):
        count = min(config.prompts_per_request, config.prompts - start)
        prompts = task.probe_prompts(start, count)
        new = ask_engine(run, lambda engine, asked=prompts: [asdict(row) for row in _sample(run, engine, asked, version)])
        rows += [PassRate(**row) for row in new]
        if run.progress is not None:
            run.progress.advance("pass-rate probe", len(rows), config.prompts)
    summary = summarise_rates(rows, config)
    verdict = kill_reason(probed=summary.prompts, mixed=summary.mixed, in_band=summary.in_band, config=config)
    on_rank0(lambda: _write(run, conditions, rows, summary, verdict))
    if verdict is not None:
        raise StopRun(f"data gate: the launch rule kills this run: {verdict}; see {run.folder.root / 'probe.json'}")


def _rows_file(run: Run) -> Path:
    return run.folder.root / "probe.jsonl"


def _begin(run: Run, task: BuiltTask, conditions: Conditions) -> list[dict[str, Any]]:
    """Start probe.jsonl with the conditions and the rows that are taken over; those rows."""
    config = run.config.data_gate
    found = earlier_rows(config.append_to, conditions)[: config.prompts]
    check_same_prompts(config.append_to, found, task.probe_prompts(0, len(found)))
    rows = [asdict(row) for row in found]
    head = {"format": PROBE_FORMAT, "conditions": asdict(conditions)}
    _rows_file(run).write_text("".join(dump_line(line) + "\n" for line in (head, *rows)), encoding="utf-8")
    return rows


def probe_conditions(run: Run, task: BuiltTask, model_digest: str) -> Conditions:
    """What the pass rates of this probe depend on."""
    rollout = run.config.rollout
    return Conditions(
        task=run.config.task.kind.value,
        seed=run.config.seed,
        extraction=task.grader.mode,
        rendering_sha256=rendering_sha256(task.renderer),
        model_digest=model_digest,
        samples=run.config.data_gate.samples_per_prompt,
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
    )


def _sample(run: Run, engine: RolloutEngine, prompts: Sequence[Prompt], version: int) -> list[PassRate]:
    """Pass rates of these prompts, appended to probe.jsonl. On rank 0."""
    samples = run.config.data_gate.samples_per_prompt
    sampling = replace(training_sampling(run, 0), samples_per_prompt=samples, seed=run.config.seed)
    completions = engine.generate(prompts, sampling)
    check_completions(prompts, completions, version=version, samples_per_prompt=samples)
    scores = score_completions(run.task, prompts, completions, run.reward)
    observe = auditor(run, "probe")
    if observe is not None:
        observe(prompts, completions, scores)
    rows = pass_rates(prompts, completions, scores, samples=samples)
    with _rows_file(run).open("a", encoding="utf-8") as file:
        file.writelines(dump_line(asdict(row)) + "\n" for row in rows)
    return rows


def pass_rates(
    prompts: Sequence[Prompt], completions: Sequence[Completion], scores: Sequence[Score], *, samples: int
) -> list[PassRate]:
    """One row per prompt, in order. ValueError when a prompt does not have its samples."""
    groups: dict[str, list[Score]] = {prompt.prompt_id: [] for prompt in prompts}
    for completion, score in zip(completions, scores, strict=True):
        groups[completion.prompt_id].append(score)
    short = Counter({name: len(found) for name, found in groups.items() if len(found) != samples})
    if short:
        raise ValueError(f"{len(short)} probed prompts do not have {samples} samples, first {next(iter(short.items()))}")
    return [
        PassRate(
            prompt_id=prompt.prompt_id,
            question=prompt.question,
            answer=prompt.answer,
            samples=samples,
            correct=sum(score.correct for score in groups[prompt.prompt_id]),
            extracted=sum(score.extracted is not None for score in groups[prompt.prompt_id]),
            truncated=sum(score.truncated for score in groups[prompt.prompt_id]),
            reward_failures=sum(score.failure is not None for score in groups[prompt.prompt_id]),
        )
        for prompt in prompts
    ]


def _write(run: Run, conditions: Conditions, rows: Sequence[PassRate], summary: GateSummary, verdict: str | None) -> None:
    config, root = run.config.data_gate, run.folder.root
    kept = [row for row in rows if in_band(row, low=config.band_low, high=config.band_high)]
    found = tuple(BandRow(row.prompt_id, row.question, row.answer, row.samples, row.correct) for row in kept)
    write_band(root / "band.jsonl", Band(conditions, config.band_low, config.band_high, len(rows), summary.mixed, found))
    record: dict[str, Any] = {**summary.to_json(), "kill_reason": verdict, "conditions": asdict(conditions)}
    write_json(root / "probe.json", {**record, "band": [config.band_low, config.band_high]})
    if run.progress is not None:
        for line in table(summary, config, verdict):
            run.progress.line(line)
