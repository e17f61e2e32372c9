"""A quantity by two others, as colour: blocks upwards and training steps to the right, or two settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from depthscope.drawing.palette import BLACK
from depthscope.drawing.panels import SMALL, cells, colour_bar, edges, label, panels, whole_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]


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
    shown = np.ma.masked_invalid(values)
    bar = colour_bar(figure, ax, cells(ax, values, steps, blocks, limits=limits or (None, None)))
    if level is not None:
        bar.ax.axhline(level, color=BLACK, linewidth=1.2)
        if min(shown.shape) > 1 and shown.count() and shown.min() < level < shown.max():
            ax.contour(steps, blocks, shown, levels=[level], colors=BLACK, linewidths=1.2)
    if len(steps) > 1:  # the outer cells are half as wide: there is no step before the first
        ax.set_xlim(steps[0], steps[-1])
    label(ax, title, "training step", "block")
    whole_numbers(ax.xaxis)
    whole_numbers(ax.yaxis)
    return figure


def paint_plane(ax: Axes, values: Array, x: Array, y: Array, *, limits: tuple[float, float]) -> Any:
    """Values (y, x) as colour in a plane whose upward axis is logarithmic, each with its number in its cell.

    Grey where there is none. Returns what a colour bar is made of.
    """
    colours = cells(ax, values, x, np.exp(edges(np.log(y))), limits=limits)
    low, high = limits
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = BLACK if value > (low + high) / 2 else "white"
            centre = {"ha": "center", "va": "center", "fontsize": SMALL - 1}
            ax.text(float(x[column]), float(y[row]), f"{value:.1f}", color=colour, **centre)  # type: ignore[arg-type]
    ax.set_yscale("log")
    ax.set_xticks(x, [f"{tick:g}" for tick in x])
    ax.set_yticks(y, [f"{tick:g}" for tick in y])
    ax.minorticks_off()
    return colours
