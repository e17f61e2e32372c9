"""With `--full`: the path shares of every length."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from depthscope.cli.display import show_table

if TYPE_CHECKING:
    from depthscope.attention_paths import PathShares

_MEASURES = ("projection_share", "norm_share", "cosine", "composite_residual")


def show_lengths(shares: PathShares) -> None:
    """A row per length: how many paths there are, and what they make of the output."""
    from depthscope.attention_paths import CONSTANT

    headings = ["length", "paths", "share along\nthe output", "norm", "cosine", "composite\nresidual"]
    rows = []
    for length, row in shares.summary().iterrows():
        place = int(str(length))
        constant = place == CONSTANT
        cells = [_number(float(row[measure])) for measure in _MEASURES]
        rows.append(["constant" if constant else str(place), "" if constant else _power(shares.counts[place]), *cells])
    show_table(headings, rows)


def _power(count: int) -> str:
    return str(count) if count < 10**6 else f"{float(count):.1e}" if count < 10**300 else "> 1e+300"


def _number(value: float) -> str:
    """Three digits; what is smaller than a thousandth is rounding, or next to nothing."""
    return "·" if math.isnan(value) else f"{value:.3f}" if abs(value) < 1e3 else f"{value:.1e}"
