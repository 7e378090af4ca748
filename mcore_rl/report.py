"""report.html and its pictures, from the files of a run folder alone: for a finished run, a failed one or one still running."""

from __future__ import annotations

from pathlib import Path

from mcore_rl.report_data import load_run
from mcore_rl.report_html import render_page
from mcore_rl.report_plots import (
    Plot,
    draw_accuracy,
    draw_clip,
    draw_delta,
    draw_entropy,
    draw_groups,
    draw_optimizer,
    draw_responses,
    draw_reward,
    draw_seconds,
    draw_teacher,
)
from mcore_rl.report_routing import draw_expert_load, draw_load_peak, draw_router_entropy
from mcore_rl.run_folder import RunFolder

PLOTS = (
    Plot("reward", "Reward of the rollouts", "On the task reward, before any filter.", draw_reward),
    Plot("accuracy", "Held-out accuracy", "Same prompts before and after; bars are 95 % Wilson intervals.", draw_accuracy),
    Plot(
        "delta",
        "Trainer against sampler",
        "Same tokens, same weights. A sync that goes stale or misses a tensor climbs.",
        draw_delta,
    ),
    Plot("entropy", "Policy entropy", "Of the token distribution, over response tokens.", draw_entropy),
    Plot("groups", "Groups", "A group whose answers all score alike has no advantage and teaches nothing.", draw_groups),
    Plot("responses", "Answers", "Form, and length in tokens.", draw_responses),
    Plot("clip", "Clipping", "Share of ratios outside the window, and how far from 1 the ratio went, per update.", draw_clip),
    Plot("optimizer", "Optimizer", "Gradient norm before clipping, per update, and the learning rate.", draw_optimizer),
    Plot("seconds", "Where the time goes", "Wall-clock seconds of each step by stage.", draw_seconds),
    Plot(
        "router_entropy", "Router entropy", "Full softmax over the experts, over response tokens, per layer.", draw_router_entropy
    ),
    Plot("load_peak", "Load of the busiest expert", "Over the mean load of its layer; 1 is even.", draw_load_peak),
    Plot("expert_load", "Load of every expert", "Share of the layer's choices, first and last step.", draw_expert_load),
)
# What a distillation shows in the place of the clip, which it does not have.
TEACHER = Plot("teacher", "Distillation", "Distance from the teacher on the student's own answers, per update.", draw_teacher)
_DPI = 140


def write_report(folder: RunFolder) -> Path:
    """Write report.html and plots/*.png; the page's path. What is missing is named on the page.

    Raises ValueError when the folder is no run folder or one of its files is broken.
    """
    data = load_run(folder)
    folder.plots.mkdir(exist_ok=True)
    pictures: list[tuple[Plot, Path]] = []
    distilled = any(name.startswith("teacher_kl_nats/") for row in data.rows for name in row)
    for plot in (TEACHER if distilled and plot.name == "clip" else plot for plot in PLOTS):
        figure = plot.draw(data)
        if figure is not None:
            path = folder.plots / f"{plot.name}.png"
            figure.savefig(path, dpi=_DPI)
            pictures.append((plot, path))
    folder.report.write_text(render_page(data, pictures, folder.root.resolve().name), encoding="utf-8")
    return folder.report
