"""The rollout-correctness contract between two engine settings, from two finished runs that differ in nothing else.

A: mean forward KL(target || accelerated) < 0.05 nats per response token, both teacher-forced on the same prefixes, over full
distributions or the top K with the rest as one event; interval by bootstrap over responses. B: wall-clock of a step in the
real loop. C: the held-out evaluation after the run, paired prompt by prompt. A is necessary, not sufficient; B and C are of
the two runs as they were. Pure: nothing here starts an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.algorithms.divergence import TopList, list_kl
from mcore_rl.evaluate import EvalResult, paired_gain
from mcore_rl.statistics import paired_bootstrap

KL_LIMIT_NATS = 0.05
_MAY_DIFFER = ("rollout", "sync", "name", "out_dir")


@dataclass(frozen=True)
class Gate:
    """One gate's verdict: pass, fail, or unclear where the interval reaches over the limit. figures: what it rests on."""

    verdict: str
    figures: dict[str, float]


def gate_a(target: Sequence[TopList], accelerated: Sequence[TopList], *, samples: int) -> Gate:
    """From the likeliest tokens at every place of the same responses. ValueError when they do not line up.

    The interval resamples responses, weighted by their tokens. Besides: share of tokens whose most likely token differs.
    """
    if [len(one.ids) for one in target] != [len(one.ids) for one in accelerated] or not sum(len(one.ids) for one in target):
        raise ValueError("contract: the two engines did not score the same response tokens")
    pairs = list(zip(target, accelerated, strict=True))
    found = [list_kl(p, q) for p, q in pairs]
    tokens = sum(len(one.kl) for one in found)
    # Sums over a response, scaled so that their mean over responses is the mean over tokens.
    sums = [len(found) / tokens * float(one.kl.sum()) for one in found]
    interval = paired_bootstrap([0.0] * len(sums), sums, samples=samples)
    verdict = "pass" if interval.high < KL_LIMIT_NATS else "fail" if interval.low >= KL_LIMIT_NATS else "unclear"
    return Gate(
        verdict,
        {
            "mean_forward_kl_nats": interval.mean,
            "low_nats": interval.low,
            "high_nats": interval.high,
            "limit_nats": KL_LIMIT_NATS,
            "max_kl_nats": max(float(one.kl.max()) for one in found if len(one.kl)),
            "shared_mass_mean": sum(float(one.shared_mass.sum()) for one in found) / tokens,
            "top1_disagreement": sum(int((p.ids[:, 0] != q.ids[:, 0]).sum()) for p, q in pairs) / tokens,
            "responses": float(len(found)),
            "tokens": float(tokens),
        },
    )


def gate_b(target: Sequence[Mapping[str, Any]], accelerated: Sequence[Mapping[str, Any]]) -> Gate:
    """Mean seconds of a step, its stages summed, from the metric rows of both runs, the first step left out.

    ValueError with fewer than two steps.
    """
    seconds = [[_step_seconds(row) for row in rows[1:]] for rows in (target, accelerated)]
    if not all(seconds):
        raise ValueError("contract: gate B needs at least two steps of each run; the first one is left out")
    means = [sum(row) / len(row) for row in seconds]
    figures = {
        "target_step_s": means[0],
        "accelerated_step_s": means[1],
        "ratio": means[1] / means[0],
        "steps": float(min(map(len, seconds))),
    }
    return Gate("pass" if means[1] < means[0] else "fail", figures)


def gate_c(target: EvalResult, accelerated: EvalResult, *, samples: int) -> Gate:
    """Held-out accuracy after the two runs: fails when the accelerated one is worse by more than the paired interval."""
    gain = paired_gain(target, accelerated, samples=samples)
    figures = {
        "target_accuracy": target.accuracy,
        "accelerated_accuracy": accelerated.accuracy,
        "difference": gain.mean,
        "low": gain.low,
        "high": gain.high,
        "prompts": float(gain.n),
    }
    return Gate("fail" if gain.high < 0 else "pass", figures)


def check_comparable(target: Mapping[str, Any], accelerated: Mapping[str, Any]) -> None:
    """ValueError naming the configuration sections in which two runs differ besides the engine's own."""
    keys = sorted(key for key in target.keys() | accelerated.keys() if key not in _MAY_DIFFER)
    other = [key for key in keys if target.get(key) != accelerated.get(key)]
    if other:
        raise ValueError(f"contract: the runs differ in {', '.join(other)}; only {', '.join(_MAY_DIFFER)} may differ")


def verdict(gates: Mapping[str, Gate]) -> dict[str, Any]:
    """The verdict file: pass when every gate passes, fail when one fails."""
    kinds = {gate.verdict for gate in gates.values()}
    overall = "fail" if "fail" in kinds else "unclear" if "unclear" in kinds else "pass"
    return {"verdict": overall, "gates": {name: asdict(gate) for name, gate in gates.items()}}


def _step_seconds(row: Mapping[str, Any]) -> float:
    return math.fsum(float(value) for name, value in row.items() if name.startswith("seconds/"))
