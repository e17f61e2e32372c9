"""What the eigenvalues of W_V W_O say of a run of blocks, beside what was measured there (Dovonon et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from depthscope.naming import blocks_of, ranges, runs_of
from depthscope.usage import Finding

if TYPE_CHECKING:
    from depthscope.diagnosis.facts import Facts
    from depthscope.value_spectra import Spectra

ROUNDING = 1e-9  # of |1 + μ|
SIDE = 0.75  # of the eigenvalues on one side of 0: three of four, where random weights have two


@dataclass(frozen=True)
class Leaning:
    """The longest run of blocks whose value weights lean to one side."""

    first: int
    last: int
    negative_share: float  # mean over the run
    says: Literal["apart", "together"]


def leaning(f: Facts) -> Leaning | None:
    """The longest run in the part that is judged; None if no block leans, or no spectra were read."""
    if f.spectra is None:
        return None
    shares = f.spectra.by_block["negative_share"]
    inside = shares[(shares.index > f.first) & (shares.index <= f.last)]
    found: list[Leaning] = []
    for says, chosen in (("apart", inside[inside >= SIDE]), ("together", inside[inside <= 1 - SIDE])):
        for first, last in runs_of(int(block) for block in chosen.index):
            found.append(Leaning(first, last, float(inside.loc[first:last].mean()), says))  # type: ignore[arg-type]
    return max(found, key=lambda run: run.last - run.first, default=None)


def growing_heads(f: Facts, run: Leaning) -> float:
    """The share of the heads in a run with max_j |1 + μ_j| > 1.

    Of those the theory says that tokens become equal, where attention has no negative eigenvalue: the mean outgrows
    all else, however few eigenvalues do it. Of the others it says that they do not: what a head narrower than a token
    does not read (the kernel of its H) stays as it is.
    """
    assert f.spectra is not None
    summary = f.spectra.summary
    heads = summary[summary["block"].between(run.first, run.last) & (summary["head"] >= 0)]
    return float((heads["mean_growth"] > 1 + ROUNDING).mean())


def finding(f: Facts) -> Finding | None:
    """Does what was measured agree with what theory says of these weights?"""
    run = leaning(f)
    if run is None:
        return None
    before, after = float(f.similarity[run.first - 1]), float(f.similarity[run.last])
    grown = float(f.log_odds[run.last] - f.log_odds[run.first - 1])
    rises = after > before if math.isnan(grown) else grown > 0
    growing = growing_heads(f, run)
    alike = growing > 0.5
    does = "push tokens apart" if run.says == "apart" else "pull tokens together"
    all_the_same = " all the same" if alike and run.says == "apart" else ""
    theory = f"theory says tokens {'grow' if alike else 'do not grow'} alike there{all_the_same}"
    agrees = "which agrees" if rises == alike else "which does not agree: norms, FFNs and changing attention weigh more"
    said = (
        f"The value weights of {blocks_of(range(run.first, run.last + 1))} mostly {does} ({run.negative_share:.0%} of "
        f"their eigenvalues are negative; the largest |1 + μ| is above 1 in {growing:.0%} of the heads): {theory}. "
        f"Measured: {before:.3f} to {after:.3f}, {agrees}."
    )
    numbers = {"share": run.negative_share, "growing": growing, "before": before, "after": after}
    return Finding("value weights", said, numbers)


def headline_of(found: Spectra) -> str:
    """In one sentence: to which side the weights of a whole model lean."""
    shares = found.by_block["negative_share"].dropna()
    product = "W_Q W_Kᵀ" if found.metadata["product"] == "query-key" else "W_V W_O"
    if not len(shares):
        return f"All eigenvalues of {product} are 0 in all {found.depth} blocks."
    return f"{shares.mean():.0%} of the eigenvalues of {product} are negative; of random weights half are."


def sentences(found: Spectra) -> list[Finding]:
    """What the spectra of a whole model say, with their numbers; and what they do not."""
    shares = found.by_block["negative_share"].dropna()  # by block, the mean over its heads
    growth = found.summary.query("head >= 0")["mean_growth"].dropna()  # by head
    if not len(shares) or found.metadata["product"] == "query-key":
        return []
    apart, together = list(shares.index[shares >= SIDE]), list(shares.index[shares <= 1 - SIDE])
    said = []
    if apart:
        said.append(
            f"{len(apart)} of {len(shares)} blocks push tokens apart (3 of 4 eigenvalues negative): {ranges(apart)}."
        )
    if together:
        said.append(
            f"{len(together)} of {len(shares)} blocks pull tokens together (1 of 4 negative): {ranges(together)}."
        )
    if not said:
        said.append("No block leans far to either side.")
    growing = growth[growth > 1 + ROUNDING]
    if len(growing):
        said.append(
            f"In {len(growing)} of {len(growth)} heads, attention alone, applied again and again, would make "
            "tokens alike "
            f"(largest |1 + μ| above 1; {growing.median():.2f} in the middle). `depthscope probe` measures what "
            "happens."
        )
    else:
        said.append(
            "Attention alone, applied again and again, would not make tokens alike (no |1 + μ| is above 1). "
            "`depthscope probe` measures what happens."
        )
    numbers = {"apart": float(len(apart)), "together": float(len(together)), "growing": float(len(growing))}
    return [Finding("value weights", sentence, numbers) for sentence in said]
