"""How the rate of a collapse is read from a curve of t_div, and how far it may be off at a finite width."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

LOCAL, FLOOR = 1e-3, 1e-28  # the window: nearly equal tokens, and 4 orders above float64's rounding


def walk(alpha: float, width: int) -> float:
    """What one block adds to the variance of log t_div: Var ξ₁/E[ξ₁]² for Gaussian W of variance 1/d."""
    return (4 * alpha**2 + 2 * alpha**4) / (1 + alpha**2) ** 2 / width


def allowed(variance: float, blocks: float, trials: int) -> float:
    """How far a fitted rate may be off: half the variance (E log is not log E) and 3 standard errors.

    The least-squares slope of a random walk of B steps has the variance 6/5 of a step's over B.
    """
    return variance / 2 + 3 * (1.2 * variance / (blocks * trials)) ** 0.5


@dataclass(frozen=True)
class Fit:
    """The rate exp(slope of log t_div) inside the window, over trials."""

    rate: float
    blocks: int  # in the window, mean over trials
    bend: float  # rate of the window's second half over that of its first
    least: float  # the smallest t_div used


def fit(frame: pd.DataFrame, variant: str, alpha: float) -> Fit | None:
    """Least squares per trial; None if a trial has fewer than 8 blocks in the window."""
    rows = frame[(frame["variant"] == variant) & (frame["alpha"] == alpha)]
    rows = rows[(rows["diversity"] < LOCAL) & (rows["diversity"] > FLOOR)]
    found = []
    for _, trial in rows.groupby("trial"):
        block, log = trial["block"].to_numpy(), np.log(trial["diversity"].to_numpy())
        if len(block) < 8:
            return None
        middle = len(block) // 2
        halves = [np.polyfit(block[part], log[part], 1)[0] for part in (slice(middle), slice(middle, None))]
        found.append((np.polyfit(block, log, 1)[0], halves[1] - halves[0], len(block)))
    if not found:
        return None
    slopes, bends, counts = np.array(found).T
    rates = np.exp(slopes)
    least = float(rows["diversity"].min())
    return Fit(float(rates.mean()), round(counts.mean()), float(np.exp(bends.mean())), least)
