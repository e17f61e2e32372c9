"""What depth-phase claims: the lines predict which cells train; the closed form is what is measured."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from depthscope_lab.papers.deep.phase_lines import CHANCE, TRAINS, balanced_accuracy
from depthscope_lab.papers.study import Claim, judge, rows

WANTED = 0.9  # balanced accuracy, and the share of cells where the closed form must be near
NEAR = 0.05  # of an exponent: 5 % per block
ENOUGH = 30  # steps below which nothing is judged
NAMES = {"post": "post-norm", "pre": "pre-norm"}
OTHER_SHARES = (0.5, 0.6, 0.8, 0.9)  # of ln 10, in place of `TRAINS`
_OURS = "ours; thresholds fitted on another map, of other depth, α and τ"


def claims(frame: pd.DataFrame, config: Any) -> list[Claim]:
    """Of the map that is judged."""
    cells = rows(frame, map="judged")
    long_enough = config.steps >= ENOUGH
    found = [
        _predicted(rows(cells, wiring=wiring), name, long_enough)
        for wiring, name in NAMES.items()
        if (cells["wiring"] == wiring).any()
    ]
    return [*found, _safe(cells, long_enough), *_agreement(cells, long_enough)]


def _predicted(cells: pd.DataFrame, name: str, long_enough: bool) -> Claim:
    accuracy = balanced_accuracy(cells["expected"], cells["trains"])
    mixed = not math.isnan(accuracy)
    trained, right = int(cells["trains"].sum()), int((cells["expected"] == cells["trains"]).sum())
    many = f"{trained} of {len(cells)} cells train, the lines are right about {right}"
    others = ", ".join(
        f"{share:g}: {balanced_accuracy(cells['expected'], cells['loss'] < share * CHANCE):.2f}"
        for share in OTHER_SHARES
    )
    lines = cells.iloc[0]
    return judge(
        f"{name}: the theory's two lines predict which cells train",
        paper=f"{_OURS}: t_div ≥ {lines['least_diversity']:.2g} behind the last block, the gradient within a factor of "
        f"{lines['most_growth']:.2g}",
        ours=f"{many}; balanced accuracy {accuracy:.2f}" if mixed else f"{many}; the other side is empty",
        tolerance=f"a balanced accuracy of {WANTED:g} at least; a cell trains if its training loss ends below "
        f"{TRAINS:g}·ln 10",
        holds=bool(accuracy >= WANTED) if mixed and long_enough else None,
        note=f"with other shares of ln 10: {others}" if mixed else "",
    )


def _safe(cells: pd.DataFrame, long_enough: bool) -> Claim:
    inside = cells[cells["prescribed"]]
    share = float(inside["trains"].mean()) if len(inside) else math.nan
    return judge(
        "inside the bounds of the prescription, which are fitted on nothing, cells train",
        paper="ours: t_sim ≤ ½ behind the last block, the gradient within a factor of 10",
        ours=f"{int(inside['trains'].sum())} of {len(inside)} cells",
        tolerance="9 of 10 at least; what lies outside may train too",
        holds=share >= WANTED if len(inside) and long_enough else None,
    )


def _agreement(cells: pd.DataFrame, long_enough: bool) -> list[Claim]:
    found = []
    for name, words in (("lambda_t", "λ_t, of tokens"), ("lambda_g", "λ_g, of the gradient")):
        off = (cells[name] - cells[f"measured_{name}"]).abs()
        off = off[off < math.inf]  # at τ = 1 tokens have no exponent
        near = float((off <= NEAR).mean())
        found.append(
            judge(
                f"the closed form of {words}, is what the new blocks do",
                paper="ours, for many features; this width is 32",
                ours=f"to {NEAR:g} per block in {near:.0%} of {len(off)} cells; median {off.median():.3f}, "
                f"largest {off.max():.2f}",
                tolerance=f"to {NEAR:g} in {WANTED:.0%} of the cells",
                holds=near >= WANTED if long_enough else None,
            )
        )
    return found
