"""How a run ends: checkpoint, evaluations, summary, manifest, report, and the last lines on the screen."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.assemble import Parts
from mcore_rl.distill_gate import TeacherGate
from mcore_rl.engine_calls import ask_engine
from mcore_rl.export_check import ExportCheck, check_export
from mcore_rl.held_out import HeldOut, gain, summarise, to_json
from mcore_rl.report import write_report
from mcore_rl.run import Run
from mcore_rl.run_folder import write_json
from mcore_rl.seams import RolloutEngine
from mcore_rl.sft import GateCheck
from mcore_rl.statistics import PairedGain
from mcore_rl.summary import build_summary, write_summary
from mcore_rl.types import SamplingParams, WeightMismatch
from models.weights import ModelWeights, export_checkpoint


@dataclass
class Outcome:
    """What the run found out besides its step metrics."""

    before: HeldOut | None = None
    after: HeldOut | None = None
    gate: GateCheck | None = None
    teacher_gate: TeacherGate | None = None
    export_check: ExportCheck | None = None


def export(parts: Parts, run: Run, outcome: Outcome) -> None:
    """Write the Hugging Face checkpoint of the current weights and let plain transformers answer from it. Collective.

    WeightMismatch when transformers, with the checkpoint, would not choose the engine's greedy tokens.
    """
    trainer = parts.trainer
    with run.clock.stage("export"):
        weights = ModelWeights(trainer.chunks, trainer.spec, trainer.groups)
        export_checkpoint(weights, trainer.spec, source=parts.model_path, target=run.folder.checkpoint)
        record = ask_engine(run, lambda engine: _checked_export(parts, run, engine))
    if record is None:
        return
    outcome.export_check = ExportCheck(**record)
    if outcome.export_check.first_difference is not None:
        raise WeightMismatch(
            f"export: the checkpoint does not answer as the engine does; {outcome.export_check.first_difference}"
        )


def _checked_export(parts: Parts, run: Run, engine: RolloutEngine) -> dict[str, Any] | None:
    config = parts.config
    if config.eval.export_check_prompts == 0:
        return None
    prompts = run.task.eval_prompts("test", config.eval.export_check_prompts)
    sampling = SamplingParams(temperature=0.0, max_tokens=config.rollout.max_tokens, stop_token_ids=run.stop_token_ids)
    answers = engine.generate(prompts, sampling)
    scratch = run.folder.root / "export_check.json"
    return check_export(run.folder.checkpoint, answers, scratch, tie_nats=2 * _widest_delta(run)).to_json()


def _widest_delta(run: Run) -> float:
    """How far apart trainer and engine ever were on one token of this run, nats: two that close may change places."""
    seen = [row.get(name) for row in run.log_rows for name in ("delta_max_abs_nats", "sync/probe_max_nats")]
    return max([value for value in seen if isinstance(value, float)], default=0.0)


def close_run(run: Run, outcome: Outcome, *, exit_reason: str, completed: bool) -> None:
    """Write what the run leaves behind, on rank 0; also for a run that failed, with what it had until then."""
    found = gain(outcome.before, outcome.after, bootstrap_samples=run.config.eval.bootstrap_samples)
    extra = _extra(outcome, found)
    summary = build_summary(
        run.log_rows,
        summarise(outcome.before, outcome.after, found),
        exit_reason=exit_reason,
        seconds_by_stage=run.clock.total_s,
        extra=extra,
    )
    write_summary(run.folder, summary)
    write_json(run.folder.root / "evaluations.json", to_json({"before": outcome.before, "after": outcome.after}))
    run.sinks.close()
    if run.audit is not None:
        run.audit.close()
    if not completed:
        return
    write_report(run.folder)
    if run.progress is not None:
        run.progress.finish(_places(run), _headline(outcome, found))


def _extra(outcome: Outcome, found: PairedGain | None) -> dict[str, object]:
    extra: dict[str, object] = {}
    if found is not None:
        extra["paired_gain"] = asdict(found)
    if outcome.gate is not None:
        extra["warm_up"] = asdict(outcome.gate)
    if outcome.teacher_gate is not None:
        extra["teacher_gate"] = asdict(outcome.teacher_gate)
    if outcome.export_check is not None:
        extra["export_check"] = outcome.export_check.to_json()
    return extra


def _places(run: Run) -> dict[str, str]:
    folder = run.folder
    return {
        "report": str(folder.report),
        "summary": str(folder.summary),
        "manifest": str(folder.manifest),
        "metrics": str(folder.metrics),
        "rollouts": str(folder.rollouts),
        "audit": str(folder.audit),
        "checkpoint": str(folder.checkpoint),
        "logs": str(folder.logs),
    }


def _headline(outcome: Outcome, found: PairedGain | None) -> str:
    if found is None or outcome.before is None or outcome.after is None:
        return ""
    return (
        f"held-out greedy accuracy {outcome.before.greedy.accuracy:.3f} -> {outcome.after.greedy.accuracy:.3f}: "
        f"gain {100 * found.mean:+.1f} points, 95% interval [{100 * found.low:+.1f}, {100 * found.high:+.1f}], n={found.n}"
    )
