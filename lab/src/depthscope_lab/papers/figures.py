"""What the pictures of the studies repeat: a line from a curve, and an axis with its names, borders and blocks."""

from __future__ import annotations

from typing import Any

import pandas as pd

from depthscope.drawing import block_axis, label, line_with_band


def line(ax: Any, curve: pd.Series, colour: str, name: str | None = None, spread: Any = None, **style: Any) -> None:
    """A curve over its index, and the band of its spread."""
    line_with_band(ax, curve.index, curve, spread, colour=colour, name=name, **style)


def axis(
    ax: Any,
    title: str,
    x: str,
    y: str,
    *,
    log: bool = False,
    ylim: Any = None,
    xlim: Any = None,
    first: int = 1,
    last: int | None = None,
) -> None:
    """Names an axis; `first` and `last` are blocks."""
    if log:
        ax.set_yscale("log")
    if ylim is not None:
        ax.set_ylim(ylim)
    if xlim is not None:
        ax.set_xlim(xlim)
    if last is not None:
        block_axis(ax, last, first)
    label(ax, title, x, y)
