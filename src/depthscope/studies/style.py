"""How the figures of the studies look: one palette, one way to make axes. matplotlib is imported on first use."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from depthscope.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008: distinguishable with every common colour blindness, and in grey by lightness.
BLUE, ORANGE, GREEN, VERMILION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
PURPLE, SKY, YELLOW, BLACK = "#CC79A7", "#56B4E9", "#F0E442", "#000000"
PALETTE = (BLUE, ORANGE, GREEN, VERMILION, PURPLE, SKY, BLACK)
GREY = "#777777"  # reference lines and what the paper says


def panels(columns: int, rows: int = 1, *, width: float = 3.6, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """A figure of columns × rows axes, in reading order; sizes of one panel in inches."""
    require("matplotlib", "figures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * width, rows * height), layout="constrained")
    axes = [figure.add_subplot(rows, columns, place + 1) for place in range(columns * rows)]
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(True, color="#DDDDDD", linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(labelsize=8)
    return figure, axes


def label(ax: Axes, title: str, x: str, y: str) -> None:
    ax.set_title(title, fontsize=10, loc="left")
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)


def line_with_band(
    ax: Axes, x: Any, centre: Any, spread: Any | None = None, *, colour: str, name: str, **line: Any
) -> None:
    """A line and, in the same colour, the band centre ± spread."""
    ax.plot(x, centre, color=colour, label=name, **{"linewidth": 1.6, **line})
    if spread is not None:
        ax.fill_between(x, centre - spread, centre + spread, color=colour, alpha=0.18, linewidth=0)


def legend_below(axes: Axes | Sequence[Axes], columns: int = 2) -> None:
    """A legend under each of the axes, where it covers nothing."""
    for ax in axes if isinstance(axes, Iterable) else [axes]:
        ax.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns, fontsize=8, frameon=False, handlelength=1.8
        )


def block_axis(ax: Axes, last: int, first: int = 1) -> None:
    """Blocks are counted: whole numbers on the x axis, from the first to the last."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlim(first, last)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
