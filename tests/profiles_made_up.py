"""Profiles made of given curves: what a rule sees, without a model."""

from typing import Any

import pandas as pd

from depthscope.probing import Profile
from depthscope.probing.profile import COLUMNS, SINK_COLUMNS

ABOUT: dict[str, Any] = {
    "model": "made up",
    "class": "MadeUp",
    "family": "made up",
    "placement": "post",
    "causal": False,
    "tokens": 128,
    "samples": 2,
    "width": 64,
    "dtype": "float32",
    "parts": {},
    "weights": {"look": "initialised", "norms": 8, "moved": 0},
    "excluded_tokens": None,
}
INITIALISED = {"look": "initialised", "norms": 8, "moved": 0}
TRAINED = {"look": "trained", "norms": 8, "moved": 8}


def made_up(
    curves: dict[str, list[float]], sinks: list[tuple[int, int, int, float]] | None = None, **about: Any
) -> Profile:
    """`curves`: by measure, or "measure@station", over blocks 0..L, the same for two samples; sinks (block, sample,
    token, ratio), each with the text " the". t_div and t_cos follow t_sim unless they are given."""
    similarity = curves.get("token_similarity")
    if similarity is not None:
        curves = {"token_diversity": [1 - s for s in similarity], "cosine_similarity": similarity, **curves}
        curves.setdefault("direction_similarity", similarity)
    rows = []
    for name, values in curves.items():
        measure, _, station = name.partition("@")
        for block, value in enumerate(values):
            rows += [(block, station or "output", -1, measure, sample, value) for sample in (0, 1)]
    depth = max(len(values) for values in curves.values()) - 1
    metadata = ABOUT | {"blocks": depth} | about
    spelled = [(*sink, " the") for sink in sinks or []]
    return Profile(pd.DataFrame(rows, columns=COLUMNS), metadata, pd.DataFrame(spelled, columns=SINK_COLUMNS))


def by_map(rho: float, feed: float, start: float, depth: int) -> list[float]:
    """t_sim over blocks that follow the odds map exactly."""
    odds = [start / (1 - start)]
    for _ in range(depth):
        odds.append(rho * odds[-1] + feed)
    return [s / (1 + s) for s in odds]
