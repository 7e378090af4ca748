"""The report's pictures of routing: what each MoE layer does, step by step and expert by expert."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator

from mcore_rl.report_data import RunData
from mcore_rl.report_plots import INK, new_figure


def draw_router_entropy(data: RunData) -> Figure | None:
    """Router entropy, layers by steps."""
    layers = data.layers("router_entropy_nats")
    experts = _expert_count(data)
    bound = f" (ln {experts} = {math.log(experts):.2f} is uniform)" if experts else ""
    return _over_steps(data, layers, f"nats{bound}", "viridis")


def draw_load_peak(data: RunData) -> Figure | None:
    """Most loaded expert over the mean, layers by steps; 1 is even."""
    return _over_steps(data, data.layers("load_max_over_mean"), "max load / mean load", "magma_r")


def draw_expert_load(data: RunData) -> Figure | None:
    """Share of choices that went to each expert, first and last step."""
    layers = data.layers("expert_load")
    complete = [index for index in range(len(data.rows)) if layers and all(values[index] for values in layers.values())]
    if not complete:
        return None
    figure, axes = new_figure(2, height=_height(len(layers)))
    shares = [[_shares(values[index]) for values in layers.values()] for index in (complete[0], complete[-1])]
    top = max(max(row) for table in shares for row in table)
    images: list[AxesImage] = []
    for axis, index, table in zip(axes, (complete[0], complete[-1]), shares, strict=True):
        images.append(_image(axis, np.asarray(table), list(layers), cmap="magma_r", limits=(0.0, top)))
        axis.set_xlabel("expert", fontsize=8, color=INK)
        axis.set_title(f"step {data.steps[index]}", fontsize=9, color=INK, loc="left")
    figure.colorbar(images[0], ax=axes, shrink=0.9, pad=0.01).set_label("share of choices", fontsize=8, color=INK)
    return figure


def _over_steps(data: RunData, layers: dict[int, list[float | None]], label: str, cmap: str) -> Figure | None:
    if not layers:
        return None
    table = np.asarray([[math.nan if value is None else value for value in values] for values in layers.values()], dtype=float)
    figure, (axis,) = new_figure(height=_height(len(layers)))
    image = _image(axis, table, list(layers), cmap=cmap, limits=None)
    steps = data.steps
    ticks = MaxNLocator(nbins=min(10, len(steps)), integer=True, min_n_ticks=1).tick_values(0, len(steps) - 1)
    shown = [int(tick) for tick in ticks if 0 <= tick < len(steps)]
    axis.set_xticks(shown, [str(steps[tick]) for tick in shown])
    axis.set_xlabel("step", fontsize=8, color=INK)
    figure.colorbar(image, ax=axis, shrink=0.9, pad=0.01).set_label(label, fontsize=8, color=INK)
    return figure


def _image(axis: Axes, table: np.ndarray, layers: Sequence[int], *, cmap: str, limits: tuple[float, float] | None) -> AxesImage:
    low, high = limits or (None, None)
    image = axis.imshow(table, aspect="auto", cmap=cmap, vmin=low, vmax=high, interpolation="nearest")
    stride = max(1, len(layers) // 12)
    axis.set_yticks(range(0, len(layers), stride), [str(layer) for layer in layers[::stride]])
    axis.set_ylabel("layer", fontsize=8, color=INK)
    axis.spines[["left", "bottom"]].set_visible(False)
    return image


def _expert_count(data: RunData) -> int | None:
    lengths = {len(value) for values in data.layers("expert_load").values() for value in values if value}
    return lengths.pop() if len(lengths) == 1 else None


def _shares(load: Sequence[float]) -> list[float]:
    total = sum(load)
    return [value / total if total else 0.0 for value in load]


def _height(layers: int) -> float:
    return min(7.0, 1.6 + 0.3 * layers)
