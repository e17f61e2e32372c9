"""Small multiples: a figure of axes that look alike, and what is put into them. matplotlib is imported on first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from depthscope.drawing.palette import GRID_GREY, HEAT, LIGHT_GREY
from depthscope.extras import require
from depthscope.naming import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

SMALL, MEDIUM, LARGE = 8, 9, 10  # points: ticks and legends, the names of axes, titles


def panels(
    columns: int, rows: int = 1, *, width: float = 3.6, height: float = 3.0, title: str = ""
) -> tuple[Figure, list[Axes]]:
    """A figure of columns × rows axes, in reading order; sizes of one panel in inches."""
    make = require("matplotlib.figure", "figures").Figure
    figure: Figure = make(figsize=(columns * width, rows * height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(columns * rows)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color=GRID_GREY, linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=SMALL)
    if title:
        figure.suptitle(plain(title), fontsize=LARGE + 1)
    return figure, axes


def second_axis(ax: Axes, text: str, colour: str) -> Axes:
    """A y axis on the right for another quantity, in the colour of its curves."""
    twin = ax.twinx()
    twin.spines["top"].set_visible(False)
    twin.tick_params(labelsize=SMALL, colors=colour)
    twin.set_ylabel(plain(text), fontsize=MEDIUM, color=colour)
    return twin


def plain(text: str) -> str:
    """A name as it is: nothing in it is mathematics to matplotlib ($), and nothing is a control character."""
    return visible(text).replace("$", r"\$")


def label(ax: Axes, title: str, x: str, y: str) -> None:
    """The title, to the left, and the names of the axes."""
    ax.set_title(plain(title), fontsize=LARGE, loc="left")
    ax.set_xlabel(plain(x), fontsize=MEDIUM)
    ax.set_ylabel(plain(y), fontsize=MEDIUM)


def line_with_band(
    ax: Axes, x: Any, centre: Any, spread: Any | None = None, *, colour: str, name: str | None, **line: Any
) -> None:
    """A line and, in the same colour, the band centre ± spread."""
    ax.plot(x, centre, color=colour, label=name and plain(name), **{"linewidth": 1.6, **line})
    if spread is not None:
        band(ax, x, centre - spread, centre + spread, colour=colour)


def band(ax: Axes, x: Any, low: Any, high: Any, *, colour: str) -> None:
    """The range around a curve, in its colour; lighter than the curve."""
    ax.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)


def reference_band(ax: Axes, x: Any, low: Any, high: Any, *, name: str) -> None:
    """What a curve is compared with: a grey band behind it."""
    ax.fill_between(x, low, high, color=LIGHT_GREY, linewidth=0, zorder=0.5, label=plain(name))


def legend_below(axes: Axes | Sequence[Axes], columns: int = 2, handles: Sequence[Any] | None = None) -> None:
    """A legend under each of the axes, where it covers nothing; of all that has a name, or of the handles."""
    chosen = {} if handles is None else {"handles": handles}
    for ax in axes if isinstance(axes, Iterable) else [axes]:
        style: dict[str, Any] = {"ncols": columns, "handlelength": 1.8, "fontsize": SMALL, "frameon": False, **chosen}
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), **style)


def legend_inside(ax: Axes) -> None:
    """A legend where it covers least."""
    ax.legend(fontsize=SMALL, frameon=False)


def shared_legend(figure: Figure, ax: Axes, columns: int = 3) -> None:
    """One legend under the whole figure, for panels that all show what this one names."""
    handles, names = ax.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False)


def cells(ax: Axes, values: Any, x: Any, y: Any, *, limits: tuple[float | None, float | None] = (None, None)) -> Any:
    """Values (y, x) as colour in cells with these borders, or around these centres; grey where there is none (nan or
    infinite). `limits` are the values of the darkest and the brightest colour, by default those of the data. Returns
    what a colour bar is made of."""
    ax.grid(False)
    ax.set_facecolor(LIGHT_GREY)
    shown, (low, high) = np.ma.masked_invalid(np.asarray(values, dtype=float)), limits
    across, upwards = (edges(at) if len(at) == n else at for at, n in ((x, shown.shape[1]), (y, shown.shape[0])))
    return ax.pcolormesh(across, upwards, shown, cmap=HEAT, vmin=low, vmax=high, rasterized=True)


def edges(centres: Any) -> Any:
    """The borders of cells around these centres; the outer cells are as wide as they are on their inner side."""
    centres = np.asarray(centres, dtype=float)
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def colour_bar(ax: Axes, painted: Any, **options: Any) -> Any:
    """A colour bar beside the axes, with small numbers."""
    bar = ax.figure.colorbar(painted, ax=ax, **options)
    bar.ax.tick_params(labelsize=SMALL)
    return bar


def block_axis(ax: Axes, last: int, first: int = 1) -> None:
    """Blocks are counted: whole numbers on the x axis, from the first to the last."""
    ax.set_xlim(first, max(last, first + 1))
    whole_numbers(ax.xaxis)


def whole_numbers(axis: Axis) -> None:
    """Marks of an axis at whole numbers only, and at round ones: steps of 1, 2, 5, 10, 20, …"""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10]))


def similarity_axis(ax: Axes, least: float = 0.0) -> None:
    """The same y axis for every similarity: from 0, or the least value if that is below, to 1."""
    ax.set_ylim(min(-0.02, least), 1.02)


def empty(text: str) -> Figure:
    """A figure that says why there is nothing to see."""
    figure, (ax,) = panels(1)
    ax.text(0.5, 0.5, plain(text), ha="center", fontsize=SMALL, transform=ax.transAxes)
    return figure
