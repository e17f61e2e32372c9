"""Where a similarity is going: the odds map s → ρs + c fitted to a profile, and the depth at which it arrives.

The map is that of `theory.odds`, for post-norm blocks of one kind after each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from depthscope.theory import OddsMap

FEWEST_PAIRS = 3  # two unknowns and one pair more
_GRID = 81  # candidates for c
_RESAMPLES = 100
_LARGE = 3.0  # t_sim 0.75
_FEWEST_OF_A_SIDE = 2
_ROUNDS = 20  # of ρ and c in turn, at most; each round shrinks the error by about s_small/s_large


@dataclass(frozen=True)
class Trend:
    """A fit to the odds of consecutive blocks."""

    map: OddsMap
    error: float  # median |log s − log of what the map says|: how far a block lies from it
    alternatives: tuple[OddsMap, ...]  # fits to resampled pairs: what the data cannot tell apart

    def block_of(self, similarity: float, odds: float, block: int) -> tuple[int | None, int | None, int | None]:
        """The block at which it passes `similarity`, from `odds` at `block`: best, earliest, latest.

        None: never, or beyond ten times the depth, where a trend of these blocks says nothing.
        """
        most = 10 * block
        steps = [step.depth_to(similarity, odds, most=most - block) for step in (self.map, *self.alternatives)]
        found = [None if step is None else block + step for step in steps]
        others = np.quantile([most if there is None else there for there in found[1:]], (0.1, 0.9))
        low, high = (None if value >= most else round(float(value)) for value in others)
        return found[0], low, high


def fit_trend(log_odds: Sequence[float] | NDArray[np.float64]) -> Trend | None:
    """ρ and c from the log-odds of blocks 0..L; None with fewer than `FEWEST_PAIRS` pairs of finite neighbours.

    Medians, since one odd block must not decide, and apart, since each is plain where the other is not: ρ from
    pairs with s > 3, where c is little beside ρs, and c from pairs with s < 1, where the error of ρs is little
    beside it. Where one side has too few pairs, both from all pairs at once. `alternatives` are fits to
    pairs drawn with replacement, by a fixed seed.
    """
    logs = np.asarray(log_odds, dtype=np.float64)
    whole = np.isfinite(logs[:-1]) & np.isfinite(logs[1:])
    if whole.sum() < FEWEST_PAIRS:
        return None
    before, after = np.exp(logs[:-1][whole]), np.exp(logs[1:][whole])
    best = _fit(before, after)
    draws = np.random.default_rng(0).integers(len(before), size=(_RESAMPLES, len(before)))
    others = tuple(_fit(before[draw], after[draw]) for draw in draws)
    error = float(np.median(np.abs(np.log(after / (best.rho * before + best.feed)))))
    return Trend(best, error, others)


def _fit(before: NDArray[np.float64], after: NDArray[np.float64]) -> OddsMap:
    """ρ and c in turn until they agree; from all pairs at once where one side has none to speak of."""
    large, small = before > _LARGE, before < 1
    if large.sum() < _FEWEST_OF_A_SIDE or small.sum() < _FEWEST_OF_A_SIDE:
        return _fit_together(before, after)
    feed = 0.0
    for _ in range(_ROUNDS):
        rho = float(np.median((after - feed)[large] / before[large]))
        feed, old = max(0.0, float(np.median((after - rho * before)[small]))), feed
        if abs(feed - old) <= 1e-6:
            break
    return OddsMap(max(rho, 1e-9), feed)


def _fit_together(before: NDArray[np.float64], after: NDArray[np.float64]) -> OddsMap:
    """The least absolute deviation of log s' from log(ρs + c): c from a grid, the best ρ for it a median."""
    c = np.concatenate([[0.0], np.geomspace(1e-4, 1.0, _GRID) * after.max()])[:, None]  # (candidates, 1)
    rho = np.median(np.maximum((after - c) / before, 1e-9), axis=1, keepdims=True)  # (candidates, 1)
    deviation = np.abs(np.log(after) - np.log(rho * before + c))  # (candidates, pairs)
    best = int(deviation.sum(axis=1).argmin())
    return OddsMap(float(rho[best, 0]), float(c[best, 0]))
