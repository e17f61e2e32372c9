"""The three ways in which tokens can become alike (Dovonon et al. 2025), each weaker than the one before it.

*Input convergence*: all tokens become equal, ‖HFC‖/‖LFC‖ → 0, where t_sim = 1/(1 + (‖HFC‖/‖LFC‖)²). *Angle
convergence*: they all point one way, their mean cosine → 1. *Rank convergence*: they lie on one line, and their
effective rank goes to 1. Over finitely many blocks they are reached where the rules of a verdict see no difference any
more: t_sim or cosine of .99, fewer than two directions. So a weaker one may be reached later than a stronger: the
effective rank counts small directions by their size, not by their energy. It is then said to follow.
"""

from __future__ import annotations

import math

import numpy as np

from depthscope.diagnosis.facts import Facts
from depthscope.measures import EQUAL

LINE = 2.0  # effective rank: two directions carry all tokens


def measured(f: Facts) -> bool:
    """Whether all three were measured, at what enters and at the end, and no outlier token makes the rank."""
    names = ("token_similarity", "cosine_similarity", f.rank)
    return not f.rank_is_spoilt and all(math.isfinite(f.start(name) + f.end(name)) for name in names)


def definitions(f: Facts) -> dict[str, float | str]:
    """What was measured for each at the entrance and at the end, and the block from which on it is reached."""
    t_sim = f.curve("token_similarity")
    t_div = f.curve("token_diversity") if f.has("token_diversity") else 1 - t_sim
    with np.errstate(divide="ignore"):
        ratio = np.sqrt(t_div / t_sim)
    cosine, rank = f.curve("cosine_similarity"), f.curve(f.rank)
    without = f.rank == "ordinary_rank" and f.sink is not None
    found: dict[str, float | str] = {"without": " without outliers" if without else ""}
    implied = False
    for name, curve, reached in (
        ("input", ratio, t_sim >= EQUAL),
        ("angle", cosine, cosine >= EQUAL),
        ("rank", rank, rank < LINE),
    ):
        found |= {f"{name}_start": float(curve[f.first]), f"{name}_end": float(curve[f.last])}
        found[f"{name}_said"] = _said(reached[f.first : f.last + 1].tolist(), f.first, implied)
        implied |= bool(reached[f.last])
    return found


def _said(reached: list[bool], first: int, implied: bool) -> str:
    """From which block on it holds until the end."""
    if not reached[-1]:
        return "follows from it with more blocks" if implied else "not reached"
    since = max((place + 1 for place, there in enumerate(reached) if not there), default=0)
    return f"reached at block {first + since}" if since else "there from the start"
