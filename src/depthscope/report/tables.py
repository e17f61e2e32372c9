"""The data of a page: tables of aggregates, each written once and shared by all charts, packed for JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from depthscope.measures import MEASURES
from depthscope.probing import Profile

NUMBERS = "numbers"
NUMBER_COLUMNS = ["run", "block", "station", "head", "measure", "value"]
_DIGITS = 5  # significant: a difference that a chart cannot show is not worth the bytes
Where = Mapping[str, Sequence[Any]]  # column → the values that a chart shows of it


def numbers_of(profile: Profile) -> pd.DataFrame:
    """Every number of a profile, mean over samples: block, station, head (−1: none), measure, value.

    Numbers that are names (which feature is largest) have no mean, and are left out.
    """
    is_name = profile.frame["measure"].isin([name for name in MEASURES if MEASURES[name].is_name])
    means = profile.frame[~is_name].groupby(["station", "head", "measure", "block"])["value"].mean()
    return means.sort_index().reset_index()


def chosen(table: pd.DataFrame, where: Where) -> pd.DataFrame:
    """The rows that a chart shows."""
    for column, values in where.items():
        table = table[table[column].isin(list(values))]
    return table


def packed(table: pd.DataFrame) -> dict[str, Any]:
    """A table column by column. Texts are numbers of a list; those and whole numbers are runs of equal steps.

    `[1, 3, 0, 2]` is 1, 2, 3, 3, 3: three steps of 1, two of 0, from 0 on. Other numbers have five digits; what is not
    finite is null.
    """
    columns = []
    for name in table.columns:
        values = table[name]
        if pd.api.types.is_integer_dtype(values):
            columns.append({"name": name, "steps": _steps(values.to_numpy(dtype=np.int64))})
        elif pd.api.types.is_numeric_dtype(values) and not pd.api.types.is_bool_dtype(values):
            columns.append({"name": name, "values": [_rounded(value) for value in values.tolist()]})
        else:
            codes, texts = pd.factorize(values.astype(str))
            columns.append({"name": name, "texts": list(texts), "steps": _steps(codes)})
    return {"length": len(table), "columns": columns}


def _steps(values: np.ndarray) -> list[int]:
    """As pairs (step, how often)."""
    steps = np.diff(values, prepend=0)
    starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] + 1)) if len(steps) else np.array([], dtype=int)
    counts = np.diff(np.append(starts, len(steps)))
    return [int(number) for pair in zip(steps[starts], counts, strict=True) for number in pair]


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
