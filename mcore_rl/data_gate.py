"""The data gate: can these prompts teach this model anything? Pure functions over pass rates.

Buckets and band are about the verdict `correct`, never about the reward: a wrong answer may pay something. A group in
which all samples have one verdict gives no gradient; with pass rate p and n samples its chance is p^n + (1-p)^n.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mcore_rl.config.reward import DataGateConfig
from mcore_rl.data.band_file import Band

ALL_WRONG, MIXED, ALL_RIGHT = "all_wrong", "mixed", "all_right"
# Not a law: where one unanimous bucket holds this much, somebody should look before a run is started.
LOOK_SHARE = 0.8


@dataclass(frozen=True)
class PassRate:
    """One probed prompt: how many of its samples were correct, had an answer that parsed, were cut off, and had no
    reward because the reward call failed (their verdict counts all the same).
    """

    prompt_id: str
    question: str
    answer: str
    samples: int
    correct: int
    extracted: int
    truncated: int
    reward_failures: int

    @property
    def bucket(self) -> str:
        """all_wrong, mixed or all_right."""
        if self.correct == 0:
            return ALL_WRONG
        return ALL_RIGHT if self.correct == self.samples else MIXED

    @property
    def mixed_by_parser(self) -> bool:
        """Mixed only because answers did not parse: every answer that parsed is right. Not real disagreement."""
        return self.bucket == MIXED and self.extracted == self.correct


def in_band(row: PassRate, *, low: float, high: float) -> bool:
    """Whether the share of correct samples lies in [low, high]."""
    return low <= row.correct / row.samples <= high


@dataclass(frozen=True)
class GateSummary:
    """A probe in numbers. correct_histogram[k]: prompts with k correct samples. Rates are over all samples."""

    prompts: int
    samples_per_prompt: int
    all_wrong: int
    mixed: int
    all_right: int
    in_band: int
    mixed_by_parser: int
    accuracy: float
    extract_rate: float
    truncation_rate: float
    reward_failures: int
    correct_histogram: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """Builtins only."""
        return {**asdict(self), "correct_histogram": list(self.correct_histogram)}


def summarise_rates(rows: Sequence[PassRate], config: DataGateConfig) -> GateSummary:
    """Buckets, band and rates of the probed prompts. ValueError: no rows, or not all with the same number of samples."""
    sizes = {row.samples for row in rows}
    if len(sizes) != 1:
        raise ValueError(
            f"data gate: {len(rows)} probed prompts with {sorted(sizes)} samples; all need the same number, at least 1"
        )
    n = sizes.pop()
    buckets = [row.bucket for row in rows]
    total = n * len(rows)
    return GateSummary(
        prompts=len(rows),
        samples_per_prompt=n,
        all_wrong=buckets.count(ALL_WRONG),
        mixed=buckets.count(MIXED),
        all_right=buckets.count(ALL_RIGHT),
        in_band=sum(in_band(row, low=config.band_low, high=config.band_high) for row in rows),
        mixed_by_parser=sum(row.mixed_by_parser for row in rows),
        accuracy=sum(row.correct for row in rows) / total,
        extract_rate=sum(row.extracted for row in rows) / total,
        truncation_rate=sum(row.truncated for row in rows) / total,
        reward_failures=sum(row.reward_failures for row in rows),
        correct_histogram=tuple(sum(row.correct == k for row in rows) for k in range(n + 1)),
    )


def kill_reason(*, probed: int, mixed: int, in_band: int, config: DataGateConfig) -> str | None:
    """Why a run on these prompts must not start, by the rule set before it; None when it may."""
    if mixed < config.min_mixed_frac * probed:
        rule = f"data_gate.min_mixed_frac={config.min_mixed_frac}"
        return f"{mixed} of {probed} prompts have right and wrong samples, fewer than {rule}"
    if in_band < config.min_band_frac * probed:
        return f"{in_band} of {probed} prompts are in the band, fewer than data_gate.min_band_frac={config.min_band_frac}"
    return None


def gate_band(band: Band, config: DataGateConfig) -> None:
    """The launch rule at the start of a run that trains on a band. ValueError with the reason when it fires."""
    reason = kill_reason(probed=band.probed, mixed=band.mixed, in_band=len(band.rows), config=config)
    if reason is not None:
        raise ValueError(f"task.band_file: the launch rule refuses this run: {reason}")


def early_kill_reason(rows: Sequence[Mapping[str, Any]], config: DataGateConfig) -> str | None:
    """Why a run is to stop after its first `early_kill_steps` steps: not one group was mixed or had any reward variance.

    rows: metrics of the steps so far. Looks once, at exactly that many steps; None otherwise.
    """
    steps = config.early_kill_steps
    if steps == 0 or len(rows) != steps:
        return None
    alive = [row for row in rows if row["zero_var_frac"] < 1.0 or row["all_wrong_frac"] + row["all_right_frac"] < 1.0]
    if alive:
        return None
    return (
        f"data gate: in the first {steps} steps every group was unanimous (last accuracy {rows[-1]['accuracy']:.3f}), so "
        "there is nothing to learn from; ease the task, warm up longer or train on a band (data_gate.early_kill_steps)"
    )


def table(summary: GateSummary, config: DataGateConfig, verdict: str | None) -> list[str]:
    """The probe as lines for a person."""
    n, prompts = summary.samples_per_prompt, summary.prompts
    band = f"{config.band_low:.0%} to {config.band_high:.0%}"
    lines = [f"{prompts} prompts x {n} samples: accuracy {summary.accuracy:.3f}, parsed {summary.extract_rate:.3f}, "]
    lines[0] += f"truncated {summary.truncation_rate:.3f}, reward failures {summary.reward_failures}"
    counts = (("all wrong", summary.all_wrong), ("mixed", summary.mixed), ("all right", summary.all_right))
    lines += [f"{name:<10} {count:>6}  {count / prompts:6.1%}" for name, count in counts]
    lines.append(f"{'in band':<10} {summary.in_band:>6}  {summary.in_band / prompts:6.1%}  ({band} correct)")
    if summary.mixed_by_parser:
        lines.append(f"of the mixed ones {summary.mixed_by_parser} only because wrong answers did not parse")
    width = len(str(prompts)) + 1
    lines.append("correct    " + "".join(f"{k:>{width}}" for k in range(n + 1)))
    lines.append("prompts    " + "".join(f"{count:>{width}}" for count in summary.correct_histogram))
    lines += [
        f"{count / prompts:.0%} of the prompts are {name}: look at them"
        for name, count in counts
        if name != "mixed" and count >= LOOK_SHARE * prompts
    ]
    lines.append("launch rule: passes" if verdict is None else f"launch rule: KILL, {verdict}")
    return lines
