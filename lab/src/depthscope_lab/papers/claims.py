"""How a study says what it found: a claim as one record, and the rows of its frame by what stands in them."""

from __future__ import annotations

from typing import Any

import pandas as pd

from depthscope_lab.papers.study import Claim, judge


def said(
    claim: str, paper: str, ours: str, tolerance: str, holds: Any, note: str = "", *, when: bool = True, needs: str = ""
) -> Claim:
    """A claim with its verdict. Not testable here: `holds` is None, or not `when`, and then the note is `needs`."""
    verdict = None if holds is None or not when else bool(holds)
    return judge(
        claim, paper=paper, ours=ours, tolerance=tolerance, holds=verdict, note=note if when else needs or note
    )


def rows(frame: pd.DataFrame, **where: object) -> pd.DataFrame:
    """The rows that have these values in these columns."""
    for column, value in where.items():
        frame = frame[frame[column] == value]
    return frame


def curve(frame: pd.DataFrame, value: str = "value", by: str = "block", **where: object) -> pd.Series:
    """The mean of one column by another, over the rows that have these values."""
    return rows(frame, **where).groupby(by)[value].mean()
