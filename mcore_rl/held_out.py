"""Held-out evaluation inside a run: rank 0 asks the engine, every rank gets the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mcore_rl.auditing import auditor
from mcore_rl.engine_calls import ask_engine
from mcore_rl.evaluate import EvalResult, EvalSpec, evaluate, paired_gain
from mcore_rl.run import Run
from mcore_rl.statistics import PairedGain
from mcore_rl.summary import EvalSummary
from mcore_rl.types import StaleRollout

_EVAL_SEED = 20_011


@dataclass(frozen=True)
class HeldOut:
    """One look at the test split: greedy, and at temperature 1 where the configuration asks for it."""

    greedy: EvalResult
    at_t1: EvalResult | None


def evaluate_on_rank0(run: Run, *, split: str, count: int, temperature: float) -> EvalResult:
    """Answer `count` prompts of `split` with the policy's weights. StaleRollout when the engine holds others."""
    spec = evaluation_spec(run, split=split, count=count, temperature=temperature)
    observe = auditor(run, f"{split}/{spec.decoding}")
    record = ask_engine(run, lambda engine: evaluate(run.task, engine, spec, reward=run.reward, observe=observe).to_json())
    result = EvalResult.from_json(record)
    version = run.policy.weights().version
    if result.version != version:
        raise StaleRollout(f"evaluation used weights of version {result.version}, the policy is at {version}")
    return result


def evaluation_spec(run: Run, *, split: str, count: int, temperature: float) -> EvalSpec:
    """The conditions of this run's evaluations."""
    return EvalSpec(
        split=split,
        prompts=count,
        temperature=temperature,
        max_tokens=run.config.rollout.max_tokens,
        stop_token_ids=run.stop_token_ids,
        extraction=run.extraction,
        seed=_EVAL_SEED,
        reward_version=run.reward_version,
    )


def look(run: Run, label: str) -> HeldOut | None:
    """The test split at the current weights, shown under `label`; None when eval.prompts is 0."""
    config = run.config.eval
    if config.prompts == 0:
        return None
    with run.clock.stage("eval"):
        greedy = evaluate_on_rank0(run, split="test", count=config.prompts, temperature=0.0)
        at_t1 = evaluate_on_rank0(run, split="test", count=config.prompts, temperature=1.0) if config.temperature_1 else None
    if run.progress is not None:
        run.progress.evaluation(label, greedy.accuracy, greedy.ci95_half_width, greedy.n)
    return HeldOut(greedy, at_t1)


def gain(before: HeldOut | None, after: HeldOut | None, *, bootstrap_samples: int) -> PairedGain | None:
    """Greedy accuracy after minus before on the same prompts, with its paired interval; None where either is missing."""
    if before is None or after is None:
        return None
    return paired_gain(before.greedy, after.greedy, samples=bootstrap_samples)


def summarise(before: HeldOut | None, after: HeldOut | None, found: PairedGain | None) -> EvalSummary:
    """The evaluations as the summary wants them; None for what did not run."""
    newest = after or before
    return EvalSummary(
        accuracy_before=before.greedy.accuracy if before else None,
        accuracy_after=after.greedy.accuracy if after else None,
        ci95_half_width=newest.greedy.ci95_half_width if newest else None,
        paired_gain_ci95_low=found.low if found else None,
        accuracy_before_t1=before.at_t1.accuracy if before and before.at_t1 else None,
        accuracy_after_t1=after.at_t1.accuracy if after and after.at_t1 else None,
        eval_n=newest.greedy.n if newest else None,
    )


def to_json(looks: Mapping[str, HeldOut | None]) -> dict[str, object]:
    """evaluations.json: every look with its conditions and its verdict per prompt."""
    return {
        label: {"greedy": found.greedy.to_json(), "t1": found.at_t1.to_json() if found.at_t1 else None}
        for label, found in looks.items()
        if found is not None
    }
