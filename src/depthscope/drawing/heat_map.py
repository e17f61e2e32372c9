"""A quantity by two others, as colour: blocks and training steps, lengths of paths or heads, or two settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from depthscope.drawing.palette import BLACK
from depthscope.drawing.panels import SMALL, cells, colour_bar, edges, label, panels, plain, whole_numbers

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]
_MOST_NUMBERS = 40  # rows whose numbers can still be read
_LIMITS = {"cosine": (-1.0, 1.0), "rate": (0.0, 1.0), "top1": (0.0, 1.0), "top5": (0.0, 1.0), "error": (0.0, 1.0)}


def draw_heat_map(
    values: Array,
    blocks: Array,
    steps: Array,
    *,
    title: str,
    limits: tuple[float, float] | None = None,
    level: float | None = None,
) -> Figure:
    """Values (blocks, steps) as colour; grey where there is none (nan or infinite).

    A cell lies around its step; the axis begins at the first step and ends at the last.
    `limits` are the values of the darkest and the brightest colour, by default those of the data. At `level` there is
    a line in the colour bar, and in the map wherever values pass it.
    """
    figure, (ax,) = panels(1, width=7.0, height=3.8)
    bar = paint_map(ax, values, steps, blocks, title, "training step", "block", limits=limits or (None, None))
    shown = np.ma.masked_invalid(values)
    if level is not None:
        bar.ax.axhline(level, color=BLACK, linewidth=1.2)
        if min(shown.shape) > 1 and shown.count() and shown.min() < level < shown.max():
            ax.contour(steps, blocks, shown, levels=[level], colors=BLACK, linewidths=1.2)
    if len(steps) > 1:  # the outer cells are half as wide: there is no step before the first
        ax.set_xlim(steps[0], steps[-1])
    return figure


def paint_map(ax: Axes, values: Any, x: Any, y: Any, title: str, across: str, upwards: str, **options: Any) -> Any:
    """Values (y, x) as colour over whole numbers, with a colour bar, which is returned; options as of `cells`."""
    extend = options.pop("extend", "neither")
    bar = colour_bar(ax, cells(ax, values, x, y, **options), extend=extend)
    label(ax, title, across, upwards)
    whole_numbers(ax.xaxis)
    whole_numbers(ax.yaxis)
    return bar


def paint_plane(ax: Axes, values: Array, x: Array, y: Array, *, limits: tuple[float, float]) -> Any:
    """Values (y, x) as colour in a plane whose upward axis is logarithmic, each with its number in its cell.

    Grey where there is none. Returns what a colour bar is made of.
    """
    colours = cells(ax, values, x, np.exp(edges(np.log(y))), limits=limits)
    for (row, column), value in np.ndenumerate(values):
        _write(ax, float(x[column]), float(y[row]), value, f"{value:.1f}", sum(limits) / 2)
    ax.set_yscale("log")
    ax.set_xticks(x, [f"{tick:g}" for tick in x])
    ax.set_yticks(y, [f"{tick:g}" for tick in y])
    ax.minorticks_off()
    return colours


def _write(ax: Axes, x: float, y: float, value: float, text: str, bright: float) -> None:
    """A number in its cell, black where the cell is brighter than that of `bright`."""
    if np.isfinite(value):
        colour = BLACK if value > bright else "white"
        ax.text(x, y, text, color=colour, ha="center", va="center", fontsize=SMALL - 1)


def draw_depth_use(frame: pd.DataFrame, matrix: pd.DataFrame, names: Mapping[str, str], *, title: str = "") -> Figure:
    """How much of its depth a model uses: blocks × quantities with their numbers, and what skipping does to whom.

    `frame` has a row per block and the columns of `names`, of which those with numbers are drawn, each in its own range
    of colours; `matrix` has skipped blocks × later blocks, and may be empty. Grey is what is not there."""
    shown = [name for name in names if name in frame and np.isfinite(frame[name].to_numpy(dtype=float)).any()]
    blocks = frame["block"].to_numpy()
    width, height = max(3.5, 1.6 + 0.62 * len(shown)), min(14.0, 1.8 + 0.26 * len(frame))
    figure, (table, *maps) = panels(1 if matrix.empty else 2, width=width, height=height, title=title)
    for place, name in enumerate(shown):
        values = frame[name].to_numpy(dtype=float)
        low, high = colour_limits(name, values)
        cells(table, values[:, None], [place, place + 1], blocks, limits=(low, high))
        for block, value in zip(blocks, values, strict=True) if len(blocks) <= _MOST_NUMBERS else ():
            text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e4 else f"{value:.0e}"
            _write(table, place + 0.5, block, value, text, low + 0.6 * (high - low))
    table.set_xticks(np.arange(len(shown)) + 0.5, [plain(names[name]) for name in shown], rotation=60, ha="right")
    table.set_yticks(blocks[:: -(-len(blocks) // _MOST_NUMBERS)])
    table.tick_params(length=0)
    label(table, "by block; each column has its own colours", "", "block")
    for ax in maps:
        numbers = np.arange(1, len(matrix) + 1)
        what = ("how far a later block changes what it adds", "later block", "skipped block")
        paint_map(ax, matrix.to_numpy(), numbers, numbers, *what, limits=(0.0, 1.0), extend="max")
    return figure


def colour_limits(name: str, values: Any) -> tuple[float, float]:
    """The values of the darkest and of the brightest colour of a column."""
    fixed = _LIMITS.get(name.rpartition("_")[2])
    if fixed is not None:
        return fixed
    finite = values[np.isfinite(values)]
    # One block that is far from all others, often the first or the last, would leave the rest in one colour.
    return min(0.0, float(finite.min())), float(max(np.quantile(finite, 0.9), 1e-12))
