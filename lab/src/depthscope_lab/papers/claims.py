"""What the studies share: a claim as one record, rows and curves of a frame, lines and axes of a picture."""

from __future__ import annotations

from typing import Any

import pandas as pd

from depthscope.drawing import block_axis, label, line_with_band
from depthscope_lab.papers.study import Claim, judge


def said(
    claim: str, paper: str, ours: str, tolerance: str, holds: Any, note: str = "", *, when: bool = True, lacks: str = ""
) -> Claim:
    """A claim with its verdict. Not testable here: `holds` is None, or not `when`, or it `lacks` what the note says."""
    verdict = None if holds is None or lacks or not when else bool(holds)
    return judge(claim, paper=paper, ours=ours, tolerance=tolerance, holds=verdict, note=lacks or note)


def rows(frame: pd.DataFrame, **where: object) -> pd.DataFrame:
    """The rows that have these values in these columns."""
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def curve(frame: pd.DataFrame, value: str = "value", by: str = "block", **where: object) -> pd.Series:
    """The mean of one column by another, over the rows that have these values."""
    return rows(frame, **where).groupby(by)[value].mean()


def line(ax: Any, curve: pd.Series, colour: str, name: str | None = None, spread: Any = None, **style: Any) -> None:
    """A curve over its index, and the band of its spread."""
    line_with_band(ax, curve.index, curve, spread, colour=colour, name=name, **style)


def axis(
    ax: Any, title: str, x: str, y: str, *, log: bool = False, first: int = 1, last: int | None = None, **limits: Any
) -> None:
    """Names an axis; `first` and `last` are blocks, `xlim` and `ylim` other limits."""
    if log:
        ax.set_yscale("log")
    ax.set(**limits)
    if last is not None:
        block_axis(ax, last, first)
    label(ax, title, x, y)
