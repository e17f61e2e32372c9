"""What eight seeds can tell apart: paired differences by seed, Student's t, Holm's correction over a page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from scipy import stats  # type: ignore[import-untyped]

LEVEL = 0.05


@dataclass(frozen=True)
class Difference:
    """The mean of a − b over seeds that both have, where it lies in 95 of 100 cases, and how likely it is by chance."""

    mean: float
    low: float
    high: float
    p: float
    seeds: int


def paired_difference(a: Mapping[int, float], b: Mapping[int, float]) -> Difference:
    """Of two variants, seed → loss: pairs have the same data in the same order.

    p is two-sided, of Student's paired t. With fewer than two pairs, or a loss that is not finite, there is no interval
    (nan) and p is 1. Where all pairs differ by the same, p is 0, or 1 if that is nothing.
    """
    pairs = [a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())]
    if len(pairs) < 2 or not all(map(math.isfinite, pairs)):
        return Difference(math.nan, math.nan, math.nan, 1.0, len(pairs))
    mean = fmean(pairs)
    error = math.sqrt(sum((one - mean) ** 2 for one in pairs) / (len(pairs) - 1) / len(pairs))
    free = len(pairs) - 1
    if error == 0:
        return Difference(mean, mean, mean, float(mean == 0), len(pairs))
    around = float(stats.t.ppf(1 - LEVEL / 2, free)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, free))
    return Difference(mean, mean - around, mean + around, p, len(pairs))


def holm(ps: Sequence[float]) -> list[float]:
    """p-values, each corrected for all of them (Holm 1979): the k-th least of m times m − k + 1, never falling."""
    found, most = [0.0] * len(ps), 0.0
    for rank, place in enumerate(sorted(range(len(ps)), key=lambda place: ps[place])):
        most = max(most, min(1.0, (len(ps) - rank) * ps[place]))
        found[place] = most
    return found


@dataclass(frozen=True)
class Standing:
    """What is said of a variant: "best", "not separated", "worse", "not learned", "died" or "baseline"."""

    variant: str
    loss: float  # the mean over seeds; infinite where a seed has died
    standing: str
    to_best: Difference | None = None
    p: float = 1.0  # of `to_best`, corrected


def standings(losses: Mapping[str, Mapping[int, float]], baselines: Sequence[str], tests: int = 0) -> list[Standing]:
    """Variants from the least loss up, at one depth and budget.

    A variant has learned if it beats the best of the baselines, which need no depth, and the two are separated; if not
    it is compared with nobody. Those that have are compared with the best of them.

    Args:
        losses: Variant → seed → loss, on the same seeds.
        baselines: Which of them are baselines; at least one.
        tests: How many more comparisons the page makes elsewhere, for which Holm's correction pays too.
    """
    if not baselines:
        raise ValueError("expected a baseline that needs no depth: without one nobody can be said to have learned")
    means = {name: _mean(of) for name, of in losses.items()}
    bar = min(baselines, key=lambda name: means[name])
    alive = [name for name in losses if name not in baselines and math.isfinite(means[name])]
    over_bar = {name: paired_difference(losses[name], losses[bar]) for name in alive}
    # One family: each variant against the bar, then each against the best; the second part is no larger than the first.
    corrected = dict(zip(alive, holm([over_bar[n].p for n in alive] + [1.0] * (len(alive) + tests)), strict=False))
    learned = [name for name in alive if over_bar[name].mean < 0 and corrected[name] < LEVEL]
    best = min(learned, key=lambda name: means[name], default=None)
    others = [name for name in learned if name != best]
    to_best = {} if best is None else {name: paired_difference(losses[name], losses[best]) for name in others}
    first = [over_bar[name].p for name in alive]
    of_others = holm([to_best[name].p for name in others] + first + [1.0] * tests)[: len(others)]
    ps = dict(zip(others, of_others, strict=True))
    found = []
    for name, mean in means.items():
        if name in baselines:
            found.append(Standing(name, mean, "baseline"))
        elif name not in alive:
            found.append(Standing(name, mean, "died"))
        elif name not in learned:
            found.append(Standing(name, mean, "not learned"))
        elif name == best:
            found.append(Standing(name, mean, "best"))
        else:
            said = "worse" if ps[name] < LEVEL else "not separated"
            found.append(Standing(name, mean, said, to_best[name], ps[name]))
    return sorted(found, key=lambda one: one.loss)


def _mean(of: Mapping[int, float]) -> float:
    return fmean(of.values()) if all(map(math.isfinite, of.values())) else math.inf
