"""Measures over the blocks of a model: a panel per measure, a curve per model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from depthscope.drawing.panels import (
    band,
    block_axis,
    label,
    legend_inside,
    line_with_band,
    panels,
    reference_band,
    similarity_axis,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Curve(NamedTuple):
    """A measure at these blocks; with `low` and `high`, the range around it."""

    blocks: Sequence[int]
    values: Sequence[float]
    colour: str
    name: str | None = None  # in the legend, if there is one
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


class ReferenceBand(NamedTuple):
    """What is normal: the range of a measure at these blocks."""

    blocks: Sequence[int]
    low: Sequence[float]
    high: Sequence[float]
    name: str


def draw_by_block(
    curves: Mapping[str, Sequence[Curve]],
    *,
    references: Mapping[str, ReferenceBand] | None = None,
    title: str = "",
    width: float = 4.2,
    height: float = 3.4,
) -> Figure:
    """A panel per measure, in the order given. A legend stands in the first panel that shows a name.

    Similarities (measures with that word in their name) have the same y axis in every picture. Sizes of one panel are
    in inches.
    """
    figure, axes = panels(len(curves), width=width, height=height, title=title)
    named: set[str] = set()
    for ax, (measure, shown) in zip(axes, curves.items(), strict=True):
        for curve in shown:
            line_with_band(ax, curve.blocks, curve.values, colour=curve.colour, name=curve.name, linewidth=2)
            if curve.low is not None and curve.high is not None:
                band(ax, curve.blocks, curve.low, curve.high, colour=curve.colour)
        if references and measure in references:
            blocks, low, high, name = references[measure]
            reference_band(ax, blocks, low, high, name=name)
        label(ax, measure.replace("_", " "), "block", "")
        block_axis(ax, max((block for curve in shown for block in curve.blocks), default=1), first=0)
        if "similarity" in measure:
            values = [value for curve in shown for value in (curve.values if curve.low is None else curve.low)]
            similarity_axis(ax, min((value for value in values if math.isfinite(value)), default=0.0))
        names = set(ax.get_legend_handles_labels()[1])
        if names - named:
            legend_inside(ax)
        named |= names
    return figure
