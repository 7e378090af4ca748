"""The report's pictures over steps. Each takes the run and gives a figure, or None where its series are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mcore_rl.report_data import RunData

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7F7F7F", "#B8A500", "#5B4A9E", "#4D4D4D")
INK, GRID = "#333333", "#E4E4E4"
STAGES = ("rollout", "score", "old", "update", "sync")
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Plot:
    """One picture: file name, title, what it says, and how it is drawn."""

    name: str
    title: str
    caption: str
    draw: Callable[[RunData], Figure | None]


def new_figure(panels: int = 1, *, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A wide figure with `panels` side by side, without frames."""
    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = [figure.add_subplot(1, panels, index + 1) for index in range(panels)]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color("#BBBBBB")
        axis.tick_params(colors=INK, labelsize=8, length=3, color="#BBBBBB")
        axis.set_axisbelow(True)
    return figure, axes


def over_steps(axis: Axes, data: RunData, lines: Mapping[str, Sequence[float]], label: str) -> None:
    """One line per entry against the step, with a legend where there are several."""
    marker = "o" if len(data.rows) <= 40 else ""
    for color, (name, values) in zip(_cycled(len(lines)), lines.items(), strict=True):
        axis.plot(data.steps, values, color=color, lw=1.7, marker=marker, ms=3, label=name)
    axis.set_xlabel("step", fontsize=8, color=INK)
    axis.set_ylabel(label, fontsize=8, color=INK)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(axis="y", color=GRID, lw=0.8)
    if len(lines) > 1:
        legend_above(axis, len(lines))


def legend_above(axis: Axes, entries: int) -> None:
    """One row above the axes, where no line can run through it."""
    axis.legend(
        fontsize=8,
        frameon=False,
        labelcolor=INK,
        loc="lower left",
        bbox_to_anchor=(-0.02, 1.0),
        ncols=entries,
        columnspacing=1.2,
        handlelength=1.4,
        handletextpad=0.5,
        borderaxespad=0.1,
    )


def found(data: RunData, names: Mapping[str, str]) -> dict[str, list[float]]:
    """Label -> series for the metrics that exist; `names` maps label to metric."""
    pairs = ((label, data.series(metric)) for label, metric in names.items())
    return {label: values for label, values in pairs if values is not None}


def wilson(share: float, count: int) -> tuple[float, float]:
    """95 % Wilson interval of a share of `count` trials."""
    center = (share + Z95**2 / (2 * count)) / (1 + Z95**2 / count)
    half = Z95 / (1 + Z95**2 / count) * math.sqrt(share * (1 - share) / count + Z95**2 / (4 * count**2))
    return center - half, center + half


def draw_reward(data: RunData) -> Figure | None:
    """Mean reward and accuracy of the rollouts."""
    lines = found(data, {"reward": "reward_mean", "share correct": "accuracy"})
    return _lines(data, lines, "mean over the batch")


def draw_accuracy(data: RunData) -> Figure | None:
    """Held-out accuracy before and after, greedy and sampled, each with its interval."""
    count = data.number("eval_n")
    rows = {"greedy": ("accuracy_before", "accuracy_after"), "temperature 1": ("accuracy_before_t1", "accuracy_after_t1")}
    pairs = {label: tuple(data.number(name) for name in names) for label, names in rows.items()}
    if not count or all(value is None for pair in pairs.values() for value in pair):
        return None
    figure, (axis,) = new_figure()
    for index, pair in enumerate(pairs.values()):
        for offset, color, moment, share in zip((-0.12, 0.12), (COLORS[6], COLORS[0]), ("before", "after"), pair, strict=True):
            if share is None:
                continue
            low, high = wilson(share, int(count))
            error = [[share - low], [high - share]]
            label = moment if index == 0 else None
            axis.errorbar([index + offset], [share], yerr=error, fmt="o", ms=7, lw=2, capsize=4, color=color, label=label)
            axis.annotate(f"{share:.3f}", (index + offset, high), (0, 4), textcoords="offset points", ha="center", fontsize=8)
    axis.set_xticks(range(len(pairs)), list(pairs))
    axis.set_xlim(-0.6, len(pairs) - 0.4)
    axis.set_ylim(0, 1.08)
    axis.set_ylabel(f"held-out accuracy (n = {int(count)})", fontsize=8, color=INK)
    axis.grid(axis="y", color=GRID, lw=0.8)
    legend_above(axis, 2)
    return figure


def draw_entropy(data: RunData) -> Figure | None:
    """Policy entropy per token."""
    return _lines(data, found(data, {"entropy": "policy_entropy_nats"}), "nats per token")


def draw_delta(data: RunData) -> Figure | None:
    """Trainer minus sampler, and the probe of each sync, on a log axis."""
    names = {"mean": "delta_mean_abs_nats", "99th percentile": "delta_p99_nats", "max": "delta_max_abs_nats"}
    lines = found(data, {**names, "sync probe, max": "sync/probe_max_nats"})
    return _lines(data, lines, "|trainer - sampler|, nats", log=True)


def draw_groups(data: RunData) -> Figure | None:
    """Groups that teach nothing."""
    names = {"no variance": "zero_var_frac", "all wrong": "all_wrong_frac", "all right": "all_right_frac"}
    return _lines(data, found(data, names), "share of groups", share=True)


def draw_responses(data: RunData) -> Figure | None:
    """Form and length of the answers."""
    names = {"format right": "format_frac", "answer found": "extract_frac", "cut off": "resp_trunc_frac"}
    shares, length = found(data, names), found(data, {"mean": "resp_len_mean_tokens"})
    if not shares and not length:
        return None
    figure, (left, right) = new_figure(2)
    over_steps(left, data, shares, "share of answers")
    left.set_ylim(-0.03, 1.03)
    over_steps(right, data, length, "tokens per answer")
    return figure


def draw_clip(data: RunData) -> Figure | None:
    """Clipped share per update and how far the ratio went."""
    clipped = {name.replace("_", " "): values for name, values in data.family("clip_frac").items()}
    low, high = data.family("ratio_min"), data.family("ratio_max")
    if not clipped and not low:
        return None
    figure, (left, right) = new_figure(2)
    over_steps(left, data, clipped, "clipped share")
    left.set_ylim(-0.03, 1.03)
    over_steps(right, data, {}, "ratio - 1, smallest to largest")
    for color, name in zip(_cycled(len(low)), low, strict=True):
        if name in high:
            bottom, top = ([value - 1 for value in side[name]] for side in (low, high))
            right.fill_between(data.steps, bottom, top, color=color, alpha=0.25, label=name.replace("_", " "))
            right.plot(data.steps, top, data.steps, bottom, color=color, lw=1)
    right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    return figure


def draw_teacher(data: RunData) -> Figure | None:
    """Divergence from the teacher per update, and what its list does not cover."""
    divergence = {name.replace("_", " "): values for name, values in data.family("teacher_kl_nats").items()}
    outside = {name.replace("_", " "): values for name, values in data.family("mass_outside_teacher_k").items()}
    if not divergence and not outside:
        return None
    figure, (left, right) = new_figure(2)
    over_steps(left, data, divergence, "KL(student || teacher), nats per token")
    over_steps(right, data, outside, "student's mass outside the teacher's K")
    return figure


def draw_optimizer(data: RunData) -> Figure | None:
    """Gradient norm per update and the learning rate."""
    norms = {name.replace("_", " "): values for name, values in data.family("grad_norm").items()}
    rate = found(data, {"lr": "lr"})
    if not norms and not rate:
        return None
    figure, (left, right) = new_figure(2)
    over_steps(left, data, norms, "gradient norm")
    over_steps(right, data, rate, "learning rate")
    right.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    return figure


def draw_seconds(data: RunData) -> Figure | None:
    """Where the time of each step went."""
    found_stages = data.family("seconds")
    if not found_stages:
        return None
    order = [*(name for name in STAGES if name in found_stages), *(name for name in found_stages if name not in STAGES)]
    stages = {name: found_stages[name] for name in order}
    figure, (axis,) = new_figure()
    base = [0.0] * len(data.rows)
    for color, (name, values) in zip(_cycled(len(stages)), stages.items(), strict=True):
        heights = [0.0 if math.isnan(value) else value for value in values]
        axis.bar(data.steps, heights, bottom=base, color=color, width=0.85, label=name)
        base = [below + height for below, height in zip(base, heights, strict=True)]
    over_steps(axis, data, {}, "seconds")
    axis.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), labelcolor=INK)
    return figure


def _lines(
    data: RunData, lines: Mapping[str, Sequence[float]], label: str, *, log: bool = False, share: bool = False
) -> Figure | None:
    if not lines:
        return None
    figure, (axis,) = new_figure()
    over_steps(axis, data, lines, label)
    if log and any(value > 0 for values in lines.values() for value in values):
        axis.set_yscale("log")
    if share:
        axis.set_ylim(-0.03, 1.03)
    return figure


def _cycled(count: int) -> list[str]:
    return [COLORS[index % len(COLORS)] for index in range(count)]
