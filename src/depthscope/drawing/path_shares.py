"""What attention paths of each length are of a model's output, and of every block's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from depthscope.drawing.heat_map import paint_map
from depthscope.drawing.palette import BLUE, GREEN, GREY, ORANGE, VERMILION
from depthscope.drawing.panels import band, block_axis, label, legend_below, line_with_band, panels, plain

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_CURVES = {"projection_share": BLUE, "norm_share": ORANGE, "cosine": GREEN, "composite_residual": VERMILION}


def draw_path_shares(frame: pd.DataFrame, blocks: pd.DataFrame, *, title: str = "") -> Figure:
    """`frame` has the columns sample, length (−1: the constant part) and the measures; `blocks` also block. Lines: mean
    over samples; bands: their range."""
    lengths, of_blocks = (table[table["length"] >= 0] for table in (frame, blocks))
    figure, (left, right) = panels(2, width=4.2, height=3.8, title=title)
    for measure, colour in _CURVES.items():
        seen = lengths.groupby("length")[measure].agg(["mean", "min", "max"])
        line_with_band(left, seen.index, seen["mean"], colour=colour, name=measure.replace("_", " "), marker=".")
        band(left, seen.index, seen["min"], seen["max"], colour=colour)
    constant = frame.loc[frame["length"] < 0, "projection_share"].mean()
    left.axhline(constant, color=GREY, linestyle=":", label=plain("projection share of the constant part"))
    label(left, "terms of the output", "length of path", "")
    block_axis(left, int(lengths["length"].max()), first=0)
    legend_below(left)
    shares = of_blocks.groupby(["block", "length"])["projection_share"].mean().unstack("length")
    at = shares.columns.to_numpy(), shares.index.to_numpy()
    paint_map(right, shares.to_numpy(), *at, "share of each block's output", "length of path", "block")
    return figure
