"""Which step makes the tokens alike, and what theory says of it: from a profile's trunk stations and spectra."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from depthscope.probing import Profile
from depthscope.stations import CROSS, STEPS


@dataclass(frozen=True)
class Attention:
    """The attention step of the blocks that were seen: geometric means of rates, means of the rest."""

    rate: float  # r measured over the step
    estimate: float  # Cor. 2.7 at the measured branch size
    bound: float  # Thm 2.6, likewise
    omega_delta: float  # the largest ω + δ; the theorem needs less than 1
    branch_energy: float  # α²g: the branch's energy per energy that attention passes on


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

    None where the trunk inside the blocks was not measured, the placement of the norms is unknown, or a block is one
    step (parallel branches).
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
    readable = (likeness > 0) & (difference > _floor(profile))
    odds = likeness.where(readable) / difference.where(readable)
    found = odds.map(math.log, na_action="ignore").groupby("block").mean()
    return found.reindex(range(profile.depth + 1)).to_numpy(dtype=np.float64)


def attention_step(
    profile: Profile, placement: str | None, entering: np.ndarray, span: tuple[int, int]
) -> Attention | None:
    """The measured rate of the attention step beside Thm 2.6 and Cor. 2.7; None if something was not measured.

    Means over the blocks of `attention_rates`, whose arguments these are.
    """
    rates = attention_rates(profile, placement, entering, span)
    if rates is None:
        return None
    return Attention(
        rate=_geometric_mean(rates["rate"].to_numpy()),
        estimate=_geometric_mean(rates["estimate"].to_numpy()),
        bound=_geometric_mean(rates["bound"].to_numpy()),
        omega_delta=_omega_delta(profile, span),
        branch_energy=float(rates["branch_energy"].mean()),
    )


def attention_rates(
    profile: Profile, placement: str | None, entering: np.ndarray, span: tuple[int, int]
) -> pd.DataFrame | None:
    """By block, the measured rate of the attention step, the bound of Thm 2.6, the estimate of Cor. 2.7 and α²g.

    `entering` is the similarity of what enters block b + 1, by b; `span` the number before the part's first block, and
    that of its last. Blocks where one of them has no meaning are left out; None if none is left, or if something was
    not measured.

    The theorems are for branches αP X W with dσ² = 1. α²dσ² is taken from the branch's measured size:
    ‖αPXW‖²/‖X‖² = α²g(μ₁²t_sim + μ₂²t_div) in expectation. Post-norm only: in pre-norm the branch reads
    other tokens than those of the trunk.
    """
    if placement != "post":
        return None
    first, last = span
    own = slice(first + 1, last + 1)
    heads = {name: _heads(profile, name) for name in ("omega", "delta", "second_eigenvalue", "mu_mean", "mu_diversity")}
    sized = "branch_ratio" in profile.names("attention_branch") and "token_similarity" in profile.names()
    if not sized or "escalation_rate" not in profile.names("after_attention"):
        return None
    if any(values.empty for values in heads.values()):
        return None
    rate = np.asarray(profile.curve("escalation_rate", "after_attention"))[own]
    ratio = np.asarray(profile.curve("branch_ratio", "attention_branch"))[own]
    similarity = entering[first:last]

    def mean_square(values: pd.Series[float]) -> np.ndarray:
        return values.pow(2).groupby("block").mean().reindex(range(first + 1, last + 1)).to_numpy(dtype=np.float64)

    mu1, mu2, delta2, lambda2 = (
        mean_square(heads[name]) for name in ("mu_mean", "mu_diversity", "delta", "second_eigenvalue")
    )
    a = ratio**2 / (mu1 * similarity + mu2 * (1 - similarity))
    bound = 1 + a / (1 + a * delta2) * (mean_square(1 - heads["omega"]) - delta2) * similarity
    estimate = 1 + a * (1 - lambda2) / (1 + a * lambda2) * similarity
    usable = np.isfinite(rate) & np.isfinite(bound) & np.isfinite(estimate) & (bound > 0)
    if not usable.any():
        return None
    found = pd.DataFrame({"rate": rate, "bound": bound, "estimate": estimate, "branch_energy": a})
    return found.assign(block=range(first + 1, last + 1))[usable].reset_index(drop=True)


def _omega_delta(profile: Profile, span: tuple[int, int]) -> float:
    """The largest ω + δ of a head in these blocks."""
    first, last = span
    sums = (_heads(profile, "omega") + _heads(profile, "delta")).groupby("block").max()
    return float(sums.reindex(range(first + 1, last + 1)).max())


def _geometric_mean(values: np.ndarray) -> float:
    return float(np.exp(np.log(values).mean()))


def _floor(profile: Profile) -> float:
    epsilon = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float64": 2.0**-53}.get(profile.metadata.get("dtype", ""))
    return (4 * (2.0**-24 if epsilon is None else epsilon)) ** 2


def _heads(profile: Profile, measure: str) -> pd.Series[float]:
    """A measure of attention by block, sample and head; empty if it was not taken."""
    frame = profile.frame
    rows = frame[(frame["station"] == "attention") & (frame["measure"] == measure)]
    return rows.set_index(["block", "sample", "head"])["value"]
