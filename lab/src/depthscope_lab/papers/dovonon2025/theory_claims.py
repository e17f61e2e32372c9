"""What the study of the theory claims: signs, orders, the exact condition, rates, and every row of the table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthscope_lab.papers.claims import rows, said
from depthscope_lab.papers.dovonon2025.theory_cases import MEAN, SETS
from depthscope_lab.papers.study import Claim

SHOWN = (1, 6, 12, 24)
FALLS = "falls from each of these depths to the next"
FLAGS = ["settled", "input_seen", "input_said", "angle_seen", "agrees", "real_spectra"]


def claims_of(frame: pd.DataFrame, near: float) -> list[Claim]:
    parts = {str(name): own.dropna(axis="columns", how="all") for name, own in frame.groupby("part")}
    scale, found = parts["scale"], parts["case"].astype(dict.fromkeys(FLAGS, bool))
    apart = scale["apart"].max()
    plane = parts["plane"].astype({"equal": bool, "inside": bool})
    clear = plane[(plane["rate_said"] - 1).abs() > near]
    wrong = int((clear["equal"] == clear["inside"]).sum())
    negative = rows(found, kind="negative")
    seen, should = negative["input_seen"].sum(), negative["input_said"].sum()
    settled = rows(found, settled=True)
    return [
        said(
            "X_L = Σ c γ^L a hᵀ in closed form is the repeated step at every depth to 24",
            "eq. (vec update) and Def. 4: the eigenvalues 1 + λμ",
            f"largest relative difference of ‖HFC‖/‖LFC‖ {apart:.0e} over {len(scale)} depths and scales",
            "1e-6: the closed form loses digits to the condition of A's eigenvectors",
            apart < 1e-6,
        ),
        *_scales(scale),
        said(
            "tokens become equal exactly outside the disc |μ + 1/(1+λ_n)| ≤ 1/(1+λ_n)",
            "the paper's condition on λ^H, made exact by us, for complex μ and real λ",
            f"{wrong} of {len(clear)} points on the wrong side; {len(plane) - len(clear)} within {near:.0%} of "
            "the border are not judged",
            "none",
            wrong == 0,
        ),
        _edge(parts["sweep"], near),
        said(
            "H with all eigenvalues in [−1, 0) never makes tokens equal, whatever A",
            "the sharpening parameterisation Λ_H in [−1, 0]; ours: |1 + λμ| ≥ 1 − |λ||μ| > 1 − |μ| for |λ| < 1",
            f"{seen} of {len(negative)} cases became equal in 4096 blocks, complex and causal A too; {should} should",
            "none",
            seen == should == 0,
        ),
        *(_row(rows(settled, dominating=name), name) for name in SETS),
        *_of_settled(settled),
    ]


def _scales(scale: pd.DataFrame) -> list[Claim]:
    """Of s > 0, of s between −2 and 0, of s below −2."""
    curves = {s: rows(scale, s=s).set_index("block")["ratio"].loc[list(SHOWN)] for s in scale["s"].unique()}
    told = {s: f"s = {s:g}: {' '.join(f'{value:.3g}' for value in own)}" for s, own in curves.items()}
    falls = {s: own.iloc[-1] < 1 and own.is_monotonic_decreasing and own.is_unique for s, own in curves.items()}
    up, between, below = (
        [s for s in told if test(s)] for test in (lambda s: s > 0, lambda s: -2 < s < 0, lambda s: s < -2)
    )
    depths = "/".join(map(str, SHOWN))
    return [
        said(
            "a positive H smooths from the first block on",
            "Thm on the dominating eigenvalue: λ^A = 1 dominates for Re μ ≥ 0",
            f"‖HFC‖/‖LFC‖ by its start at L = {depths}: {'; '.join(told[s] for s in up)}",
            FALLS,
            all(falls[s] for s in up),
        ),
        said(
            "a negative H between −1 and 0 sharpens at finite depth",
            "the same; oversmoothing “is not inevitable” (abstract)",
            f"at L = {depths}: {'; '.join(told[s] for s in between)}",
            "above its start at L = 24",
            all(curves[s].iloc[-1] > 1 for s in between),
        ),
        said(
            "a too negative H = −2.1·I smooths again where A has no negative eigenvalue",
            "not in what we know of the paper; ours: λ_n loses for μ < −2/(1+λ_n)",
            f"at L = {depths}: {'; '.join(told[s] for s in below)}",
            FALLS,
            all(falls[s] for s in below),
        ),
    ]


def _edge(sweep: pd.DataFrame, near: float) -> Claim:
    """Between the two borders tokens stay different; beyond them they become equal, as fast as predicted."""
    last = rows(sweep, depth=sweep["depth"].max())
    kept = last[~(last["ratio"] < last["limit"] / 10)]["s"]  # nan: the mean is rounding noise
    edge, step = last["edge"].iloc[0], last["s"].diff().max()
    clear = last[last["rate_said"] < 1 - near].dropna(subset="rate_seen")
    off = (np.log(clear["rate_seen"]) / np.log(clear["rate_said"]) - 1).abs().max()
    return said(
        "tokens stay different under H = sI for s between −2/(1+λ_n) and 0, else become equal at the predicted rate",
        "ours, from the exact condition",
        f"after {int(sweep['depth'].max())} blocks different from s = {kept.min():.2f} to {kept.max():.2f}; "
        f"−2/(1+λ_n) = {edge:.2f}; elsewhere the factor per block is the predicted one to {off:.1%} (in logarithms)",
        f"two steps of s ({2 * step:.2f}); 5 % of the factor's logarithm",
        abs(kept.min() - edge) < 2 * step and abs(kept.max()) < 2 * step and off < 0.05,
    )


def _row(own: pd.DataFrame, name: str) -> Claim:
    ranks = sorted(set(own["rank_seen"].astype(int)))
    follows = "input, angle and rank convergence" if name == MEAN else "no input convergence"
    return said(
        f"if {name} dominate{'s' if name.endswith(('alone', 'one other i')) else ''}, there is {follows}",
        "the table of dominating eigenvalues (theorems and corollaries after Def. 4)",
        f"{own['agrees'].sum()} of {len(own)} cases as said; {own['input_seen'].sum()} became equal, "
        f"{own['angle_seen'].sum()} aligned, rank {', '.join(map(str, ranks))}",
        "none, in cases that 4096 blocks settle",
        own["agrees"].all(),
        when=len(own) > 0,
    )


def _of_settled(settled: pd.DataFrame) -> list[Claim]:
    equal = rows(settled, input_said=True).dropna(subset=["rate_said", "rate_seen"])
    logs = equal[["rate_seen", "rate_said"]].astype(float).apply(np.log)
    off = (logs["rate_seen"] / logs["rate_said"] - 1).abs()
    ends = settled.dropna(subset=["limit_said", "limit_seen"])
    limit, apart = ends["limit_said"], (ends["limit_seen"] / ends["limit_said"] - 1).abs().max()
    unreal, causal = rows(settled, real_spectra=False), rows(settled, attention="causal")
    wrong = [(~own["agrees"]).sum() for own in (unreal, causal)]
    return [
        said(
            "tokens become equal at the rate (second eigenvalue over first)^L",
            "ours, from Def. 4",
            f"{len(equal)} cases: the factor per block agrees to {off.median():.2%} in the median, to "
            f"{off.quantile(0.9):.1%} in 90 % of them (in logarithms)",
            "1 % and 10 %: complex pairs oscillate about the rate, and a fast one ends at rounding early",
            off.median() < 0.01 and off.quantile(0.9) < 0.1,
        ),
        said(
            "a sharpening H does not raise ‖HFC‖/‖LFC‖ for ever: the ratio ends at that of the dominating mode of A",
            "not in what we know of the paper; ours: modes of A other than 1 have a mean unless A is symmetric",
            f"{len(ends)} cases, limits from {limit.min():.2g} to {limit.max():.3g}, median {limit.median():.2g}; "
            f"largest relative difference {apart:.0e}",
            "1e-6",
            apart < 1e-6,
            when=len(ends) > 0,
        ),
        said(
            "the theory holds with complex spectra and causal attention too, which the paper's Prop. 1 leaves out",
            "Prop. 1: eigenvalues of A in (−1, 1], real",
            f"{wrong[0]} of {len(unreal)} cases with complex spectra otherwise, {wrong[1]} of {len(causal)} causal "
            "ones",
            "none",
            wrong == [0, 0],
        ),
    ]
