"""The one picture of a watch: blocks upwards, steps to the right, a measure as colour; and how a tracker takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from depthscope.drawing import draw_heat_map
from depthscope.measures import ALIKE

NAME = "depth/heat_map"
Send = Callable[[Any, int], None]  # a figure, at a step


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


def sender(tracker: object) -> Send | None:
    """How a tracker of Accelerate takes a figure: TensorBoard's or Weights & Biases'; None if it takes none, or we do
    not know how."""
    writer = getattr(tracker, "writer", None)
    if callable(getattr(writer, "add_figure", None)):

        def send(figure: Any, step: int) -> None:
            assert writer is not None
            writer.add_figure(NAME, figure, step)
            writer.flush()

        return send
    if getattr(tracker, "name", None) == "wandb" and callable(log_images := getattr(tracker, "log_images", None)):
        return lambda figure, step: log_images({NAME: [figure]}, step=step)
    return None
