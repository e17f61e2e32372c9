"""Where a similarity is going: the odds map s → ρs + c fitted to a profile, and the depth at which it arrives.

The map is that of `theory.odds`, for blocks of one kind after each other. A pre-norm trunk grows, its blocks weigh
less and less, and its odds follow a power of depth instead: the exponent is then read from the last half.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from depthscope.theory import OddsMap, odds_of

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
    pairs: int
    error: float  # median |log s − log of what the law says|: how far a block lies from the map, or from the power
    alternatives: tuple[OddsMap, ...]  # fits to resampled pairs: what the data cannot tell apart
    exponent: float | None = None  # pre-norm: s ∝ block^exponent
    exponents: tuple[float, ...] = ()  # pre-norm: fits to resampled blocks

    def block_of(self, similarity: float, odds: float, block: int) -> tuple[int | None, int | None, int | None]:
        """The block at which it passes `similarity`, from `odds` at `block`: best, earliest, latest.

        None: never, or beyond ten times the depth, where a trend of these blocks says nothing.
        """
        most = 10 * block
        if self.exponent is not None:
            rise = math.log(odds_of(similarity)) - math.log(odds)
            found = [_along_power(block, rise, exponent) for exponent in (self.exponent, *self.exponents)]
        else:
            maps = (self.map, *self.alternatives)
            found = [step.depth_to(similarity, odds, most=most - block) for step in maps]
            found = [None if steps is None else block + steps for steps in found]
        others = np.quantile([most if there is None else there for there in found[1:]], (0.1, 0.9))
        low, high = (None if value >= most else round(float(value)) for value in others)
        return found[0], low, high


def fit_trend(log_odds: Sequence[float] | NDArray[np.float64], *, pre_norm: bool = False) -> Trend | None:
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
    if pre_norm:
        return Trend(best, len(before), *_power(logs, others))
    error = float(np.median(np.abs(np.log(after / (best.rho * before + best.feed)))))
    return Trend(best, len(before), error, others)


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


def _power(
    logs: NDArray[np.float64], others: tuple[OddsMap, ...]
) -> tuple[float, tuple[OddsMap, ...], float, tuple[float, ...]]:
    """The power of depth that the last half of the blocks follow: its error, the maps beside it, and its exponents."""
    blocks = np.flatnonzero(np.isfinite(logs) & (np.arange(len(logs)) >= max(1, len(logs) // 2)))
    x, y = np.log(blocks), logs[blocks]
    best = _slope(x, y)
    draws = np.random.default_rng(0).integers(len(blocks), size=(_RESAMPLES, len(blocks)))
    exponents = tuple(_slope(x[draw], y[draw]) for draw in draws if len(set(draw)) > 1)
    rest = y - best * x
    return float(np.median(np.abs(rest - np.median(rest)))), others, best, exponents


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The median slope of all pairs that are apart (Theil and Sen)."""
    i, j = np.triu_indices(len(x), k=1)
    apart = x[i] != x[j]
    return float(np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart]))


def _along_power(block: int, rise: float, exponent: float) -> int | None:
    """The block at which log-odds that grow like block^exponent have risen by `rise`; None: later than ten times it."""
    if exponent <= 0 or rise / exponent >= math.log(10):
        return None
    return math.ceil(block * math.exp(rise / exponent))
