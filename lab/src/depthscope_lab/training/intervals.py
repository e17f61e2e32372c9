"""The bootstrap over a handful of seeds: how far a mean may lie from where it was found. Imports nothing heavy."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations_with_replacement

CONFIDENCE = 0.95
_ALL_UP_TO = 8  # values of which all nⁿ resamples are counted: 6435 different ones
_RESAMPLES = 20_000  # of more values


def bootstrap_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """Where the mean lies in all but (1 − confidence)/2 of the resamples on either side (Efron's percentiles).

    Up to eight values all nⁿ resamples are counted, so that nothing is drawn; of more, 20 000 are drawn, always the
    same ones. Of three values it is the least and the greatest: of normal ones such an interval holds the true mean
    in 3 of 4 cases, not in 95 of 100. None of fewer than two values, or where one is not finite.
    """
    n = len(values)
    if n < 2 or not all(map(math.isfinite, values)):
        return None
    if n <= _ALL_UP_TO:
        weighed = sorted(_all_means(sorted(values)))
    else:
        drawn, ordered = random.Random(0), sorted(values)
        weighed = sorted((math.fsum(drawn.choices(ordered, k=n)) / n, 1.0) for _ in range(_RESAMPLES))
    tail = (1 - confidence) / 2 * math.fsum(weight for _, weight in weighed)
    return _reached(weighed, tail), _reached(weighed[::-1], tail)


def overlap(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Whether two intervals have a point in common; one that is not known has none."""
    return one is not None and other is not None and one[0] <= other[1] and other[0] <= one[1]


def _all_means(values: list[float]) -> list[tuple[float, float]]:
    """(mean, in how many of the nⁿ resamples it comes about)."""
    n = len(values)
    found = []
    for places in combinations_with_replacement(range(n), n):
        ways = math.factorial(n) // math.prod(math.factorial(places.count(place)) for place in set(places))
        found.append((math.fsum(values[place] for place in places) / n, float(ways)))
    return found


def _reached(weighed: list[tuple[float, float]], tail: float) -> float:
    """The first mean at which more than the tail's weight has gone by."""
    gone = 0.0
    for mean, weight in weighed:
        gone += weight
        if gone > tail:
            return mean
    return weighed[-1][0]
