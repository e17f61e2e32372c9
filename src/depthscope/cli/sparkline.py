"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float = 0.0, high: float = 1.0, width: int = 60) -> str:
    """One character per value, from `low` (▁) to `high` (█); at most `width`, evenly picked. Undefined is '·'."""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    return "".join(_bar(value, low, high) for value in values)


def _bar(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return "·"
    share = (value - low) / (high - low) if high > low else 0.0
    return _BARS[min(max(int(share * len(_BARS)), 0), len(_BARS) - 1)]
