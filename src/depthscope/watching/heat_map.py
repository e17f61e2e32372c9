"""The picture of a watch: blocks upwards, training steps to the right, a measure as colour."""

from __future__ import annotations

from typing import Any

import pandas as pd

from depthscope.drawing import draw_heat_map
from depthscope.measures import ALIKE


def heat_map(records: pd.DataFrame, measure: str = "token_similarity", station: str = "output") -> Any:
    """A matplotlib figure, block × step. Grey: no value.

    Similarities have the same colours in every picture, from 0 (or less) to 1, and a line at .9.
    """
    rows = records[(records["measure"] == measure) & (records["station"] == station)]
    if rows.empty:
        there = ", ".join(sorted({f"{m} at {s}" for m, s in zip(records["measure"], records["station"], strict=True)}))
        raise ValueError(f"no {measure!r} at station {station!r} to draw; there: {there or 'nothing'}")
    table = rows.pivot_table(index="block", columns="step", values="value", aggfunc="last", dropna=False)
    similarity = measure.endswith("similarity")
    where = "" if station == "output" else f", {station.replace('_', ' ')}"
    return draw_heat_map(
        table.to_numpy(dtype=float),
        table.index.to_numpy(dtype=float),
        table.columns.to_numpy(dtype=float),
        title=measure.replace("_", " ") + where,
        limits=(0.0, 1.0) if similarity else None,
        level=ALIKE if similarity else None,
    )
