"""The picture of a watch: blocks upwards, training steps to the right, a measure as colour."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from depthscope.extras import require
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
    figure = require("matplotlib.figure", "figures").Figure(figsize=(7.0, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.set_facecolor("0.85")
    steps, blocks = table.columns.to_numpy(dtype=float), table.index.to_numpy(dtype=float)
    values = np.ma.masked_invalid(table.to_numpy(dtype=float))
    similarity = measure.endswith("similarity")
    limits = {"vmin": 0.0, "vmax": 1.0} if similarity else {}
    colours = axes.pcolormesh(_edges(steps), _edges(blocks), values, cmap="viridis", rasterized=True, **limits)
    bar = figure.colorbar(colours, ax=axes)
    if similarity:
        bar.ax.axhline(ALIKE, color="black", linewidth=1.2)
    if similarity and min(values.shape) > 1 and values.count() and values.min() < ALIKE < values.max():
        axes.contour(steps, blocks, values, levels=[ALIKE], colors="black", linewidths=1.2)
    where = "" if station == "output" else f", {station.replace('_', ' ')}"
    axes.set(xlabel="training step", ylabel="block", title=measure.replace("_", " ") + where)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _edges(centres: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The borders of cells around these centres; the outer cells are as wide as they are on their inner side."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])
