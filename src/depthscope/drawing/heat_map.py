"""A quantity by two others, as colour: blocks upwards and training steps to the right, or two settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from depthscope.drawing.palette import BLACK, HEAT, LIGHT_GREY
from depthscope.drawing.panels import SMALL, label, panels, whole_numbers

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
    ax.grid(False)
    ax.set_facecolor(LIGHT_GREY)
    shown = np.ma.masked_invalid(values)
    low, high = limits if limits is not None else (None, None)
    colours = ax.pcolormesh(_edges(steps), _edges(blocks), shown, cmap=HEAT, vmin=low, vmax=high, rasterized=True)
    bar = figure.colorbar(colours, ax=ax)
    bar.ax.tick_params(labelsize=SMALL)
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
    ax.grid(False)
    ax.set_facecolor(LIGHT_GREY)
    low, high = limits
    shown = np.ma.masked_invalid(values)
    colours = ax.pcolormesh(
        _edges(x), np.exp(_edges(np.log(y))), shown, cmap=HEAT, vmin=low, vmax=high, rasterized=True
    )
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = BLACK if value > (low + high) / 2 else "white"
            ax.text(
                float(x[column]),
                float(y[row]),
                f"{value:.1f}",
                ha="center",
                va="center",
                fontsize=SMALL - 1,
                color=colour,
            )
    ax.set_yscale("log")
    ax.set_xticks(x, [f"{tick:g}" for tick in x])
    ax.set_yticks(y, [f"{tick:g}" for tick in y])
    ax.minorticks_off()
    return colours


def _edges(centres: Array) -> Array:
    """The borders of cells around these centres; the outer cells are as wide as they are on their inner side."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])
