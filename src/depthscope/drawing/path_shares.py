"""What attention paths of each length are of a model's output, and of every block's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthscope.drawing.palette import BLUE, GREEN, GREY, ORANGE, VERMILION
from depthscope.drawing.panels import (
    LARGE,
    band,
    block_axis,
    cells,
    colour_bar,
    label,
    legend_below,
    line_with_band,
    panels,
    plain,
    whole_numbers,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_CURVES = {"projection_share": BLUE, "norm_share": ORANGE, "cosine": GREEN, "composite_residual": VERMILION}
_NAMES = {"composite_residual": "composite residual of the term"}


def draw_path_shares(
    frame: pd.DataFrame,
    blocks: pd.DataFrame,
    *,
    title: str = "",
) -> Figure:
    """`frame` has the columns sample, length (−1: the constant part) and the measures; `blocks` also block. Lines: mean
    over samples; bands: their range."""
    figure, (left, right) = panels(2, width=4.2, height=3.8)
    _draw_lengths(left, frame)
    _draw_map(figure, right, _by_block(blocks), "share of each block's output", "length of path", "block")
    if title:
        figure.suptitle(plain(title), fontsize=LARGE + 1)
    return figure


def _draw_lengths(ax: Axes, frame: pd.DataFrame) -> None:
    lengths = frame[frame["length"] >= 0]
    for measure, colour in _CURVES.items():
        by_length = lengths.groupby("length")[measure].agg(["mean", "min", "max"])
        name = _NAMES.get(measure, measure.replace("_", " "))
        line_with_band(ax, by_length.index, by_length["mean"], colour=colour, name=name, marker="o", markersize=3)
        band(ax, by_length.index, by_length["min"], by_length["max"], colour=colour)
    constant = frame.loc[frame["length"] < 0, "projection_share"].mean()
    ax.axhline(constant, color=GREY, linestyle=":", label=plain("projection share of the constant part"))
    label(ax, "terms of the output", "length of path", "")
    block_axis(ax, int(lengths["length"].max()), first=0)
    legend_below(ax)


def _by_block(blocks: pd.DataFrame) -> pd.DataFrame:
    lengths = blocks[blocks["length"] >= 0]
    return lengths.groupby(["block", "length"])["projection_share"].mean().unstack("length")


def _draw_map(figure: Figure, ax: Axes, table: pd.DataFrame, title: str, x: str, y: str) -> None:
    """Colours from the least to the largest share, rows upwards."""
    colour_bar(figure, ax, cells(ax, table.to_numpy(), table.columns.to_numpy(), table.index.to_numpy()))
    label(ax, title, x, y)
    whole_numbers(ax.xaxis)
    whole_numbers(ax.yaxis)
