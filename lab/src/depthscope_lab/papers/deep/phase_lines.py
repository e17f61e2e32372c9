"""Two lines in the plane of τ and α: on which side tokens stay apart, on which side the gradient stays in bounds.

A cell is expected to train if t_div behind the last block is at least `diversity` and the gradient grows or shrinks by
at most the factor `growth` over the whole depth. Both thresholds are fitted on one map and judged on another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import pandas as pd

TRAINS = 0.7  # of ln 10, the loss of a guess: a cell with less at the end has trained
CHANCE = math.log(10)
# Candidates, evenly in their logarithms: half an order of magnitude apart.
DIVERSITIES = tuple(10 ** (-half / 2) for half in range(1, 25))
GROWTHS = tuple(10 ** (half / 2) for half in range(1, 25))


@dataclass(frozen=True)
class Lines:
    """Where the two lines lie."""

    diversity: float
    growth: float

    def inside(self, cells: pd.DataFrame, prefix: str = "") -> pd.Series:
        """Which cells are expected to train, by their columns `diversity` and `growth` (a logarithm)."""
        apart = cells[f"{prefix}diversity"] >= self.diversity
        return apart & (cells[f"{prefix}growth"].abs() <= math.log(self.growth))


PRESCRIBED = Lines(diversity=0.5, growth=10.0)  # what `prescribe` and `recommend` hold at most: fitted on nothing


def balanced_accuracy(expected: Sequence[bool] | pd.Series, trains: Sequence[bool] | pd.Series) -> float:
    """Mean of the shares that are right among cells that train and among cells that do not; nan if one is empty."""
    pairs = list(zip(expected, trains, strict=True))
    shares = []
    for side in (True, False):
        right = [guess == side for guess, came in pairs if came == side]
        if not right:
            return math.nan
        shares.append(sum(right) / len(right))
    return sum(shares) / 2


def fitted(cells: pd.DataFrame, prefix: str = "") -> Lines:
    """The pair of thresholds with the best balanced accuracy on these cells (`trains`).

    Of several that are equally good, the one nearest to the middle of them all, on logarithmic scales. Where all cells
    train, or none does, nothing can be fitted: those of the prescription.
    """
    if cells["trains"].nunique() < 2:
        return PRESCRIBED
    found = {
        lines: balanced_accuracy(lines.inside(cells, prefix), cells["trains"])
        for lines in (Lines(*pair) for pair in product(DIVERSITIES, GROWTHS))
    }
    best = max(found.values())
    tied = [lines for lines, accuracy in found.items() if math.isclose(accuracy, best)]
    places = [(math.log(lines.diversity), math.log(lines.growth)) for lines in tied]
    middle = [sum(axis) / len(places) for axis in zip(*places, strict=True)]
    return min(zip(tied, places, strict=True), key=lambda one: math.dist(one[1], middle))[0]
