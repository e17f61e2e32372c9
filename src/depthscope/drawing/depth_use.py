"""How much of its depth a model uses: blocks × quantities as colour with numbers, and what skipping does to whom."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from depthscope.drawing.palette import BLACK
from depthscope.drawing.panels import LARGE, SMALL, cells, colour_bar, label, plain
from depthscope.extras import require

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_NUMBERS = 40  # rows whose numbers can still be read
_LIMITS = {"cosine": (-1.0, 1.0), "rate": (0.0, 1.0), "top1": (0.0, 1.0), "top5": (0.0, 1.0), "error": (0.0, 1.0)}


def draw_depth_use(frame: pd.DataFrame, matrix: pd.DataFrame, names: Mapping[str, str], *, title: str = "") -> Figure:
    """`frame` has a row per block and the columns of `names`, of which those with numbers are drawn, each in its own
    range of colours; `matrix` has skipped blocks × later blocks, and may be empty. Grey is what is not there."""
    shown = [name for name in names if name in frame and np.isfinite(frame[name].to_numpy(dtype=float)).any()]
    depth = len(frame)
    height = min(14.0, 1.8 + 0.26 * depth)
    width = 1.6 + 0.62 * len(shown)
    extra = 0.0 if matrix.empty else height + 0.6
    make = require("matplotlib.figure", "figures").Figure
    figure: Figure = make(figsize=(max(3.5, width) + extra, height), layout="constrained")
    grid = figure.add_gridspec(1, 1 if matrix.empty else 2, width_ratios=None if matrix.empty else [width, extra])
    _draw_table(figure.add_subplot(grid[0, 0]), frame, shown, names)
    if not matrix.empty:
        _draw_matrix(figure, figure.add_subplot(grid[0, 1]), matrix)
    if title:
        figure.suptitle(plain(title), fontsize=LARGE + 1)
    return figure


def _draw_table(ax: Axes, frame: pd.DataFrame, shown: list[str], names: Mapping[str, str]) -> None:
    blocks = frame["block"].to_numpy()
    for place, name in enumerate(shown):
        values = frame[name].to_numpy(dtype=float)
        low, high = colour_limits(name, values)
        cells(ax, values[:, None], [place, place + 1], blocks, limits=(low, high))
        if len(blocks) <= _MOST_NUMBERS:
            _write(ax, place, blocks, values, low, high)
    ax.set_xticks(np.arange(len(shown)) + 0.5, [plain(names[name]) for name in shown], rotation=60, ha="right")
    ax.set_yticks(blocks if len(blocks) <= _MOST_NUMBERS else blocks[:: -(-len(blocks) // _MOST_NUMBERS)])
    ax.tick_params(labelsize=SMALL, length=0)
    label(ax, "by block; each column has its own colours", "", "block")


def _write(ax: Axes, place: int, blocks: Any, values: Any, low: float, high: float) -> None:
    for block, value in zip(blocks, values, strict=True):
        if np.isfinite(value):
            bright = (value - low) / (high - low) > 0.6 if high > low else False
            text = f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}" if abs(value) < 1e4 else f"{value:.0e}"
            ax.text(place + 0.5, block, text, ha="center", va="center", fontsize=SMALL - 1,
                    color=BLACK if bright else "white")  # fmt: skip


def colour_limits(name: str, values: Any) -> tuple[float, float]:
    """The values of the darkest and of the brightest colour of a column."""
    fixed = _LIMITS.get(name.rpartition("_")[2])
    if fixed is not None:
        return fixed
    finite = values[np.isfinite(values)]
    # One block that is far from all others, often the first or the last, would leave the rest in one colour.
    return min(0.0, float(finite.min())), float(max(np.quantile(finite, 0.9), 1e-12))


def _draw_matrix(figure: Figure, ax: Axes, matrix: pd.DataFrame) -> None:
    blocks = np.arange(1, len(matrix) + 1)
    colour_bar(figure, ax, cells(ax, matrix.to_numpy(), blocks, blocks, limits=(0.0, 1.0)), extend="max")
    ax.tick_params(labelsize=SMALL)
    label(ax, "how far a later block changes what it adds", "later block", "skipped block")
