"""What the study of the theory claims: signs, orders, the exact condition, rates, and every row of the table."""

from __future__ import annotations

import numpy as np
import pandas as pd

from depthscope_lab.papers.dovonon2025.theory_cases import MEAN, SETS
from depthscope_lab.papers.study import Claim, judge

SHOWN = (1, 6, 12, 24)


def claims_of(frame: pd.DataFrame, near: float) -> list[Claim]:
    parts = {str(name): rows.dropna(axis="columns", how="all") for name, rows in frame.groupby("part")}
    settled = parts["case"][parts["case"]["settled"].astype(bool)]
    return [
        _closed_form(parts["scale"]),
        *_scales(parts["scale"]),
        _condition(parts["plane"], near),
        _edge(parts["sweep"], near),
        _never(parts["case"]),
        *(_row(settled[settled["dominating"] == name], name) for name in SETS),
        _rate(settled),
        _limit(settled),
        _complex(settled),
    ]


def _closed_form(scale: pd.DataFrame) -> Claim:
    apart = float(scale["apart"].max())
    return judge(
        "X_L = Σ c γ^L a hᵀ in closed form is the repeated step at every depth to 24",
        paper="eq. (vec update) and Def. 4: the eigenvalues 1 + λμ",
        ours=f"largest relative difference of ‖HFC‖/‖LFC‖ {apart:.0e} over {len(scale)} depths and scales",
        tolerance="1e-6: the closed form loses digits to the condition of A's eigenvectors",
        holds=apart < 1e-6,
    )


def _scales(scale: pd.DataFrame) -> list[Claim]:
    told: dict[float, str] = {}
    held: dict[float, bool] = {}
    for s in scale["s"].unique().tolist():
        curve = scale[scale["s"] == s].set_index("block")["ratio"]
        told[s] = f"s = {s:g}: " + " ".join(f"{curve.loc[block]:.3g}" for block in SHOWN)
        falls = bool(curve.loc[SHOWN[-1]] < 1 and (curve.loc[list(SHOWN)].diff().dropna() < 0).all())
        held[s] = falls if s > 0 or s < -2 else bool(curve.loc[SHOWN[-1]] > 1)
    depths = "/".join(map(str, SHOWN))
    return [
        judge(
            "a positive H smooths from the first block on",
            paper="Thm on the dominating eigenvalue: λ^A = 1 dominates for Re μ ≥ 0",
            ours=f"‖HFC‖/‖LFC‖ by its start at L = {depths}: " + "; ".join(told[s] for s in told if s > 0),
            tolerance="falls from each of these depths to the next",
            holds=all(held[s] for s in held if s > 0),
        ),
        judge(
            "a negative H between −1 and 0 sharpens at finite depth",
            paper="the same; oversmoothing “is not inevitable” (abstract)",
            ours=f"at L = {depths}: " + "; ".join(told[s] for s in told if -2 < s < 0),
            tolerance="above its start at L = 24",
            holds=all(held[s] for s in held if -2 < s < 0),
        ),
        judge(
            "a too negative H = −2.1·I smooths again where A has no negative eigenvalue",
            paper="not in what we know of the paper; ours: λ_n loses for μ < −2/(1+λ_n)",
            ours=f"at L = {depths}: " + "; ".join(told[s] for s in told if s < -2),
            tolerance="falls from each of these depths to the next",
            holds=all(held[s] for s in held if s < -2),
        ),
    ]


def _condition(plane: pd.DataFrame, near: float) -> Claim:
    clear = plane[(plane["rate_said"] - 1).abs() > near]
    wrong = clear[clear["equal"].astype(bool) == clear["inside"].astype(bool)]
    return judge(
        "tokens become equal exactly outside the disc |μ + 1/(1+λ_n)| ≤ 1/(1+λ_n)",
        paper="the paper's condition on λ^H, made exact by us, for complex μ and real λ",
        ours=f"{len(wrong)} of {len(clear)} points on the wrong side; {len(plane) - len(clear)} within {near:.0%} of "
        "the border are not judged",
        tolerance="none",
        holds=len(wrong) == 0,
    )


def _edge(sweep: pd.DataFrame, near: float) -> Claim:
    """Between the two borders tokens stay different; beyond them they become equal, as fast as predicted."""
    last = sweep[sweep["depth"] == sweep["depth"].max()]
    kept = last[~(last["ratio"] < last["limit"] / 10)]["s"]  # nan: the mean is rounding noise
    edge, step = float(last["edge"].iloc[0]), float(last["s"].diff().max())
    clear = last[last["rate_said"] < 1 - near].dropna(subset="rate_seen")
    off = float((np.log(clear["rate_seen"]) / np.log(clear["rate_said"]) - 1).abs().max())
    return judge(
        "tokens stay different under H = sI for s between −2/(1+λ_n) and 0, else become equal at the predicted rate",
        paper="ours, from the exact condition",
        ours=f"after {int(sweep['depth'].max())} blocks different from s = {kept.min():.2f} to {kept.max():.2f}; "
        f"−2/(1+λ_n) = {edge:.2f}; elsewhere the factor per block is the predicted one to {off:.1%} (in logarithms)",
        tolerance=f"two steps of s ({2 * step:.2f}); 5 % of the factor's logarithm",
        holds=bool(abs(kept.min() - edge) < 2 * step and abs(kept.max()) < 2 * step and off < 0.05),
    )


def _never(found: pd.DataFrame) -> Claim:
    rows = found[found["kind"] == "negative"]
    seen, said = int(rows["input_seen"].astype(bool).sum()), int(rows["input_said"].astype(bool).sum())
    return judge(
        "H with all eigenvalues in [−1, 0) never makes tokens equal, whatever A",
        paper="the sharpening parameterisation Λ_H in [−1, 0]; ours: |1 + λμ| ≥ 1 − |λ||μ| > 1 − |μ| for |λ| < 1",
        ours=f"{seen} of {len(rows)} cases became equal in 4096 blocks, complex and causal A too; {said} should",
        tolerance="none",
        holds=seen == said == 0,
    )


def _row(rows: pd.DataFrame, name: str) -> Claim:
    agrees = rows["agrees"].astype(bool)
    ranks = sorted(set(rows["rank_seen"].astype(int)))
    follows = {True: "input, angle and rank convergence", False: "no input convergence"}[name == MEAN]
    equal, aligned = int(rows["input_seen"].astype(bool).sum()), int(rows["angle_seen"].astype(bool).sum())
    return judge(
        f"if {name} dominate{'s' if name.endswith(('alone', 'one other i')) else ''}, there is {follows}",
        paper="the table of dominating eigenvalues (theorems and corollaries after Def. 4)",
        ours=f"{int(agrees.sum())} of {len(rows)} cases as said; {equal} became equal, {aligned} aligned, rank "
        f"{', '.join(map(str, ranks))}",
        tolerance="none, in cases that 4096 blocks settle",
        holds=bool(agrees.all()) if len(rows) else None,
    )


def _rate(settled: pd.DataFrame) -> Claim:
    rows = settled[settled["input_said"].astype(bool)].dropna(subset=["rate_said", "rate_seen"])
    logs = rows[["rate_seen", "rate_said"]].astype(float).apply(np.log)
    off = (logs["rate_seen"] / logs["rate_said"] - 1).abs()
    return judge(
        "tokens become equal at the rate (second eigenvalue over first)^L",
        paper="ours, from Def. 4",
        ours=f"{len(rows)} cases: the factor per block agrees to {off.median():.2%} in the median, to "
        f"{off.quantile(0.9):.1%} in 90 % of them (in logarithms)",
        tolerance="1 % and 10 %: complex pairs oscillate about the rate, and a fast one ends at rounding early",
        holds=bool(off.median() < 0.01 and off.quantile(0.9) < 0.1),
    )


def _limit(settled: pd.DataFrame) -> Claim:
    rows = settled.dropna(subset=["limit_said", "limit_seen"])
    off = float((rows["limit_seen"] / rows["limit_said"] - 1).abs().max())
    return judge(
        "a sharpening H does not raise ‖HFC‖/‖LFC‖ for ever: the ratio ends at that of the dominating mode of A",
        paper="not in what we know of the paper; ours: modes of A other than 1 have a mean unless A is symmetric",
        ours=f"{len(rows)} cases, limits from {rows['limit_said'].min():.2g} to {rows['limit_said'].max():.3g}, median "
        f"{rows['limit_said'].median():.2g}; largest relative difference {off:.0e}",
        tolerance="1e-6",
        holds=off < 1e-6 if len(rows) else None,
    )


def _complex(settled: pd.DataFrame) -> Claim:
    rows = settled[~settled["real_spectra"].astype(bool)]
    causal = settled[settled["attention"] == "causal"]
    wrong = [int((~part["agrees"].astype(bool)).sum()) for part in (rows, causal)]
    return judge(
        "the theory holds with complex spectra and causal attention too, which the paper's Prop. 1 leaves out",
        paper="Prop. 1: eigenvalues of A in (−1, 1], real",
        ours=f"{wrong[0]} of {len(rows)} cases with complex spectra otherwise, {wrong[1]} of {len(causal)} causal ones",
        tolerance="none",
        holds=wrong == [0, 0],
    )
