"""What the eigenvalues of W_V W_O say of a run of blocks, beside what was measured there (Dovonon et al. 2025)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from depthscope.diagnosis.outliers import runs_of

if TYPE_CHECKING:
    from depthscope.diagnosis.facts import Facts

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


def values(f: Facts) -> dict[str, float | str]:
    """What the sentence is filled with: does what was measured agree?"""
    run = leaning(f)
    assert run is not None
    before, after = float(f.similarity[run.first - 1]), float(f.similarity[run.last])
    grown = float(f.log_odds[run.last] - f.log_odds[run.first - 1])
    rises = after > before if math.isnan(grown) else grown > 0
    agrees = rises == (run.says == "together")
    where = f"block {run.first}" if run.first == run.last else f"blocks {run.first} to {run.last}"
    does = "push tokens apart" if run.says == "apart" else "pull tokens together"
    theory = "that they do not grow alike" if run.says == "apart" else "that they grow alike"
    rest = "which agrees" if agrees else "which does not agree: norms, FFNs and attention that changes weigh more there"
    return {
        "where": where,
        "does": does,
        "share": run.negative_share,
        "theory": theory,
        "before": before,
        "after": after,
        "rest": rest,
    }
