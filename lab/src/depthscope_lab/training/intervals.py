"""The bootstrap over a handful of seeds: how far a mean may lie from where it was found. Imports nothing heavy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product
from statistics import fmean

CONFIDENCE = 0.95
_ALL_UP_TO = 6  # values of which all nⁿ resamples are counted: 46 656
_RESAMPLES = 20_000  # of more values


def bootstrap_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Where the mean lies in all but (1 − confidence)/2 of the resamples on either side (Efron's percentiles).

    Up to six values all nⁿ resamples are counted, so that nothing is drawn; of more, 20 000 are drawn, always the
    same ones. Of three values it is the least and the greatest: of normal ones such an interval holds the true mean
    in 3 of 4 cases, not in 95 of 100. None of fewer than two values, or where one is not finite.
    """
    n, ordered = len(values), sorted(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return None
    drawn = random.Random(0)
    resamples = (
        product(ordered, repeat=n) if n <= _ALL_UP_TO else (drawn.choices(ordered, k=n) for _ in range(_RESAMPLES))
    )
    means = sorted(map(fmean, resamples))
    beyond = math.floor((1 - confidence) / 2 * len(means))  # on either side
    return means[beyond], means[-1 - beyond]


def overlap(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Whether two intervals have a point in common; one that is not known has none."""
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]
