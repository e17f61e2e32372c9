"""Which step makes the tokens alike: the growth of the log-odds, from a profile's stations on the residual stream."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from depthscope.probing import Profile
from depthscope.stations import CROSS, STEPS

_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}  # else that of float32


def step_growth(profile: Profile, similarity: str, span: tuple[str, int, int]) -> dict[str, float] | None:
    """Growth of the log-odds by kind of step, summed over a part's blocks after the first; mean over samples.

    `span` is the part's name, its first block (what enters it) and its last. None as for `growth_by_block`.
    """
    found = growth_by_block(profile, similarity, span)
    if found is None:
        return None
    return {str(step): float(total) for step, total in found.groupby("step", sort=False)["growth"].sum().items()}


def growth_by_block(profile: Profile, similarity: str, span: tuple[str, int, int]) -> pd.DataFrame | None:
    """Growth of the log-odds in every step: block, step, growth; a step whose odds cannot be read has 0.

    None where the residual stream inside the blocks was not measured, the placement of the norms is unknown, or a block
    is one step (parallel branches).
    """
    part, first, last = span
    placement: Any = profile.metadata.get("towers", {}).get(part, profile.metadata).get("placement")
    measured = set(profile.frame.loc[profile.frame["measure"] == similarity, "station"])
    order = tuple(STEPS[placement].items()) if has_steps(placement) else ()
    needed = {station for station, _ in order} - set(CROSS)
    if not order or not needed <= measured:
        return None
    if part == "decoder" and "after_cross_attention" not in measured:
        order = tuple((station, "cross-attention with FFN" if step == "FFN" else step) for station, step in order)
    at = {station: log_odds(profile, similarity, station) for station in (*measured, "output")}
    rows: list[tuple[int, str, float]] = []
    for block in range(first + 1, last + 1):
        here = at["input"][block] if "input" in at else np.nan
        here = at["output"][block - 1] if np.isnan(here) else here
        for station, step in order:
            if station not in at or np.isnan(at[station][block]):
                continue
            rows.append((block, step, float(np.nan_to_num(at[station][block] - here))))
            here = at[station][block]
    return pd.DataFrame(rows, columns=["block", "step", "growth"])


def has_steps(placement: Any) -> bool:
    """Whether a block of this placement has several steps, so that one of them can be to blame."""
    return len(STEPS.get(placement, ())) > 1


def log_odds(profile: Profile, similarity: str = "token_similarity", station: str = "output") -> np.ndarray:
    """log(t_sim/t_div) over blocks 0..L, mean over samples; nan where undefined or lost in the model's rounding.

    Tokens of a format with precision ε cannot be more alike than t_div ≈ (4ε)²; below that nothing is read.
    """
    frame = profile.frame
    rows = frame[(frame["station"] == station) & (frame["measure"].isin([similarity, "token_diversity"]))]
    table = rows.pivot_table(index=["block", "sample"], columns="measure", values="value", dropna=False)
    likeness = table[similarity]
    paired = similarity == "token_similarity" and "token_diversity" in table
    difference = table["token_diversity"] if paired else 1 - likeness
    readable = (likeness > 0) & (difference > (4 * _EPSILON.get(profile.metadata.get("dtype", ""), 2.0**-24)) ** 2)
    odds = likeness.where(readable) / difference.where(readable)
    found = odds.map(math.log, na_action="ignore").groupby("block").mean()
    return found.reindex(range(profile.depth + 1)).to_numpy(dtype=np.float64)
