"""What the eigenvalues of W_V W_O say of a run of blocks, beside what was measured there (Dovonon et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from depthscope.naming import runs_of

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


def values(f: Facts) -> dict[str, float | str]:
    """What the sentence is filled with: does what was measured agree with the theory?"""
    run = leaning(f)
    assert run is not None
    before, after = float(f.similarity[run.first - 1]), float(f.similarity[run.last])
    grown = float(f.log_odds[run.last] - f.log_odds[run.first - 1])
    rises = after > before if math.isnan(grown) else grown > 0
    growing = growing_heads(f, run)
    alike = growing > 0.5
    but = " all the same" if alike and run.says == "apart" else ""
    theory = f"that they grow alike{but}" if alike else "that they do not grow alike"
    rest = "norms, FFNs, attention that changes and a depth that is finite weigh more there"
    return {
        "where": f"block {run.first}" if run.first == run.last else f"blocks {run.first} to {run.last}",
        "does": "push tokens apart" if run.says == "apart" else "pull tokens together",
        "share": run.negative_share,
        "growing": growing,
        "theory": theory,
        "before": before,
        "after": after,
        "rest": "which agrees" if rises == alike else f"which does not agree: {rest}",
    }


def sentences(found: Spectra) -> list[str]:
    """What the spectra of a whole model say, with their numbers; and what they do not."""
    shares = found.by_block["negative_share"].dropna()  # by block, the mean over its heads
    growth = found.summary.query("head >= 0")["mean_growth"].dropna()  # by head
    product = "W_Q W_Kᵀ" if found.metadata["product"] == "query-key" else "W_V W_O"
    if not len(shares):
        return [f"All eigenvalues of {product} are 0 in all {found.depth} blocks."]
    said = [
        f"In all blocks together {shares.mean():.0%} of the eigenvalues μ of {product} have a negative real part; "
        "random weights have one half."
    ]
    if found.metadata["product"] == "query-key":
        return said
    leanings = {
        "mostly push tokens apart (at least 3 of 4 eigenvalues negative)": shares[shares >= SIDE],
        "mostly pull tokens together (at most 1 of 4 negative)": shares[shares <= 1 - SIDE],
    }
    for what, blocks in leanings.items():
        if len(blocks):
            said.append(f"The weights of {len(blocks)} of {len(shares)} blocks {what}: {_named(list(blocks.index))}.")
    if not any(len(blocks) for blocks in leanings.values()):
        said.append("No block leans far to either side.")
    growing = growth[growth > 1 + 1e-9]
    if len(growing):
        said.append(
            f"The largest |1 + μ| is above 1 in {len(growing)} of {len(growth)} heads ({growing.median():.2f} in the "
            "middle): were one attention matrix with eigenvalues from 0 to 1 applied again and again, tokens would "
            "become alike there in the end."
        )
    else:
        said.append(
            "No |1 + μ| is above 1: were one attention matrix with eigenvalues from 0 to 1 applied again and again, "
            "tokens would not become alike."
        )
    said.append("Norms, FFNs and attention that changes can undo it. `depthscope probe` measures what happens.")
    return said


def _named(blocks: list[int]) -> str:
    """1, 2, 3, 7 → 1 to 3, 7."""
    return ", ".join(f"{first} to {last}" if last > first else str(first) for first, last in runs_of(blocks))
