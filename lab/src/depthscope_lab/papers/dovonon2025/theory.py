"""Dovonon et al. 2025, the theory: which eigenvalues 1 + λμ dominate X → X + AXH, against simulation at finite depth.

λ are the eigenvalues of the attention A, μ those of H = W_V W_O. Four parts: H = sI over the first 24 blocks against
the closed form; the plane of complex μ with the disc |μ + 1/(1+λ_n)| ≤ 1/(1+λ_n) inside which tokens stay different;
the ratio per block over s, with the place −2/(1+λ_n) where a too negative H smooths again; and random A, H and X₀ of
every kind against the table of dominating sets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from depthscope.drawing import BLACK, BLUE, GREY, PALETTE, VERMILION, circle, legend_below, panels
from depthscope.measures import frequency_ratio
from depthscope.progress import Share
from depthscope.theory import dominance_of, mean_wins, tokens_after
from depthscope_lab.papers.dovonon2025.repeated import (
    DEPTH,
    EQUAL,
    F64,
    MEAN,
    SETS,
    attend,
    cases,
    draw_attention,
    draw_normal,
    measured_rate,
    ratios,
    repeat,
)
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, axis, judge, line, rows

SCALES = (1.0, 0.2, -0.2, -1.0, -2.1)
FIRST_BLOCKS = 24  # of the first part
DEPTHS = (*range(0, 97, 4), *range(96 + 32, 1537, 32))  # where the factor per block is read
SWEPT = (24, 192, 1536)
NEAR = 0.01  # of 1: a factor per block this close to it is not told from 1 by 1536 blocks


SHOWN = (1, 6, 12, 24)  # depths of the first part that are told
FLAGS = ["settled", "input_seen", "input_said", "angle_seen", "agrees", "real_spectra"]


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 200  # of the first part
    points: int = 900  # of the plane
    steps: int = 91  # of s
    cases: int = 100  # of each of 6 kinds of H and 3 kinds of A
    tokens: int = 12
    width: int = 8


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows of four parts; columns that a part does not have are nan.

    scale: s, block, ratio (geometric mean over draws of ‖HFC‖/‖LFC‖ by its start), closed (the same in closed form),
    apart (the largest relative difference of the two in any draw). plane: real, imag, equal (what 1536 blocks
    did), rate_said, inside, centre. sweep: s, depth, ratio, rate_seen, rate_said, edge, limit. case: see
    `cases`.
    """
    made = []
    for name, make in PARTS.items():
        made.append(make(config).assign(part=name))
        progress(len(made) / len(PARTS))
    return pd.concat(made, ignore_index=True)


def _scales(config: Config) -> pd.DataFrame:
    a = draw_attention("similar", config.trials, config.tokens, (config.seed, 1, 0))
    start = draw_normal(config.trials, config.tokens, config.width, seed=(config.seed, 1, 1))
    eye = torch.eye(config.width, dtype=F64)
    first = frequency_ratio(start)
    found = []
    for s in SCALES:
        for block, tokens in enumerate(repeat(attend(a, s * eye), start, range(FIRST_BLOCKS + 1), rescale=False)):
            seen = frequency_ratio(tokens) / first
            said = [tokens_after(x, matrix, s * eye, block) for x, matrix in zip(start, a, strict=True)]
            closed = frequency_ratio(torch.stack(said)) / first
            apart = (seen / closed - 1).abs().max().item()
            found.append((s, block, seen.log().mean().exp().item(), closed.log().mean().exp().item(), apart))
    return pd.DataFrame(found, columns=["s", "block", "ratio", "closed", "apart"])


def _plane(config: Config) -> pd.DataFrame:
    """H = [[a, b], [−b, a]] has the eigenvalues a ± ib. One A, whose spectrum is real."""
    (a,) = draw_attention("similar", 1, config.tokens, (config.seed, 2, 0))
    where = np.random.default_rng((config.seed, 2)).uniform((-3, -2), (1, 2), (config.points, 2))
    real, imag = torch.from_numpy(where).unbind(dim=1)
    h = torch.stack([torch.stack([real, imag], dim=-1), torch.stack([-imag, real], dim=-1)], dim=-2)
    start = draw_normal(config.points, config.tokens, 2, seed=(config.seed, 2, 1))
    (seen,) = ratios(attend(a, h), start, DEPTHS[-1:])
    smallest = torch.linalg.eigvals(a).real.min()
    centre = 1 / (1 + smallest).item()
    return pd.DataFrame(
        {
            "real": real.numpy(),
            "imag": imag.numpy(),
            "equal": (seen < EQUAL).numpy(),
            "rate_said": [dominance_of(a, matrix).rate for matrix in h],
            "inside": ~mean_wins(smallest, torch.complex(real, imag)).numpy(),
            "centre": -centre,
        }
    )


def _sweep(config: Config) -> pd.DataFrame:
    """H = sI on the attention of the plane."""
    (a,) = draw_attention("similar", 1, config.tokens, (config.seed, 2, 0))
    scales = torch.linspace(-3, 1.5, config.steps, dtype=F64)
    h = scales[:, None, None] * torch.eye(config.width, dtype=F64)
    start = draw_normal(1, config.tokens, config.width, seed=(config.seed, 3)).expand(config.steps, -1, -1)
    found = ratios(attend(a, h), start, DEPTHS)  # (depths, scales)
    values, vectors = torch.linalg.eig(a)
    smallest = values.real.argmin()
    about = pd.DataFrame(
        {
            "s": scales.numpy(),
            "rate_seen": measured_rate(DEPTHS, found).numpy(),
            "rate_said": [dominance_of(a, matrix).rate for matrix in h],
            "edge": -2 / (1 + values[smallest].real.item()),
            "limit": frequency_ratio(vectors[:, smallest, None].real).item(),
        }
    )
    return pd.concat([about.assign(depth=depth, ratio=found[DEPTHS.index(depth)].numpy()) for depth in SWEPT])


PARTS: dict[str, Callable[[Config], pd.DataFrame]] = {
    "scale": _scales,
    "plane": _plane,
    "sweep": _sweep,
    "case": lambda config: cases(config.cases, (config.seed, 4)),
}


def draw(frame: pd.DataFrame) -> Any:
    figure, (first, disc, swept, sets) = panels(2, 2, width=4.8, height=3.9)
    for (s, own), colour in zip(rows(frame, part="scale").groupby("s", sort=False), PALETTE, strict=False):
        line(first, own.set_index("block")["closed"], colour, f"s = {s:g}", linewidth=1.4)
        first.plot(own["block"], own["ratio"], ".", color=colour, markersize=5)
    first.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
    title, y = "H = sI: closed form (lines), simulated (dots)", "‖HFC‖/‖LFC‖ by its start"
    axis(first, title, "block", y, log=True, first=0, last=FIRST_BLOCKS)
    plane = rows(frame, part="plane")
    for equal, colour, name in ((True, BLUE, "simulated: tokens become equal"), (False, VERMILION, "simulated: not")):
        own = rows(plane, equal=equal)
        disc.plot(own["real"], own["imag"], ".", color=colour, markersize=4, label=name)
    centre = plane["centre"].iloc[0]
    circle(disc, centre, -centre, colour=BLACK, name="|μ + 1/(1+λₙ)| = 1/(1+λₙ)")
    axis(disc, "Eigenvalues μ of H, λ real", "Re μ", "Im μ", aspect="equal")
    sweep = rows(frame, part="sweep")
    for border, borders in ((sweep["edge"].iloc[0], "s = −2/(1+λₙ) and 0"), (0, None)):
        swept.axvline(border, color=BLACK, linewidth=1, linestyle=":", label=borders)
    for (depth, own), colour in zip(sweep.groupby("depth"), PALETTE, strict=False):
        look = {"marker": ".", "linewidth": 1, "markersize": 4}
        line(swept, own.set_index("s")["ratio"], colour, f"block {depth:g}", **look)
    swept.axhline(sweep["limit"].iloc[0], color=GREY, linewidth=1, linestyle="--", label="of the mode of λₙ")
    axis(swept, "H = sI: too negative smooths again", "s", "‖HFC‖/‖LFC‖", log=True, ylim=(1e-6, 1e2))
    found = rows(frame, part="case", settled=True)
    for place, name in enumerate(reversed(SETS)):
        own = rows(found, dominating=name)
        right = len(rows(own, agrees=True))
        sets.barh(place, right, color=BLUE, label=None if place else "as the theory says")
        sets.barh(place, len(own) - right, left=right, color=VERMILION, label=None if place else "otherwise")
        sets.text(len(own), place, f" {right} of {len(own)}", va="center", fontsize=8)
    sets.set_yticks(range(len(SETS)), reversed(SETS))
    most = 1.2 * found["dominating"].value_counts().max()
    axis(sets, f"Random A, H, X₀ after {DEPTH} blocks", "cases", "what dominates", xlim=(0, most))
    for ax, columns in ((first, 5), (disc, 1), (swept, 3), (sets, 2)):
        legend_below(ax, columns=columns)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    parts = {str(name): own.dropna(axis="columns", how="all") for name, own in frame.groupby("part")}
    scale, found = parts["scale"], parts["case"].astype(dict.fromkeys(FLAGS, bool))
    apart = scale["apart"].max()
    plane = parts["plane"].astype({"equal": bool, "inside": bool})
    clear = plane[(plane["rate_said"] - 1).abs() > NEAR]
    wrong = int((clear["equal"] == clear["inside"]).sum())
    negative = rows(found, kind="negative")
    seen, should = negative["input_seen"].sum(), negative["input_said"].sum()
    settled = rows(found, settled=True)
    return [
        judge(
            "X_L = Σ c γ^L a hᵀ in closed form is the repeated step at every depth to 24",
            "eq. (vec update) and Def. 4: the eigenvalues 1 + λμ",
            f"largest relative difference of ‖HFC‖/‖LFC‖ {apart:.0e} over {len(scale)} depths and scales",
            "1e-6: the closed form loses digits to the condition of A's eigenvectors",
            apart < 1e-6,
            kind="check",
        ),
        *_by_sign(scale),
        judge(
            "tokens become equal exactly outside the disc |μ + 1/(1+λ_n)| ≤ 1/(1+λ_n)",
            "the paper's condition on λ^H, made exact by us, for complex μ and real λ",
            f"{wrong} of {len(clear)} points on the wrong side; {len(plane) - len(clear)} within {NEAR:.0%} of "
            "the border are not judged",
            "none",
            wrong == 0,
        ),
        _edge(parts["sweep"]),
        judge(
            "H with all eigenvalues in [−1, 0) never makes tokens equal, whatever A",
            "the sharpening parameterisation Λ_H in [−1, 0]; ours: |1 + λμ| ≥ 1 − |λ||μ| > 1 − |μ| for |λ| < 1",
            f"{seen} of {len(negative)} cases became equal in 4096 blocks, complex and causal A too; {should} should",
            "none",
            seen == should == 0,
        ),
        *(_row(rows(settled, dominating=name), name) for name in SETS),
        *_of_settled(settled),
    ]


def _by_sign(scale: pd.DataFrame) -> list[Claim]:
    """Of s > 0, of s between −2 and 0, of s below −2."""
    curves = {s: rows(scale, s=s).set_index("block")["ratio"].loc[list(SHOWN)] for s in scale["s"].unique()}
    told = {s: f"s = {s:g}: {' '.join(f'{value:.3g}' for value in own)}" for s, own in curves.items()}
    falls = {s: own.iloc[-1] < 1 and own.is_monotonic_decreasing and own.is_unique for s, own in curves.items()}
    depths, falling = "/".join(map(str, SHOWN)), "falls from each of these depths to the next"
    return [
        judge(
            "a positive H smooths from the first block on",
            "Thm on the dominating eigenvalue: λ^A = 1 dominates for Re μ ≥ 0",
            f"‖HFC‖/‖LFC‖ by its start at L = {depths}: {'; '.join(told[s] for s in told if s > 0)}",
            falling,
            all(falls[s] for s in falls if s > 0),
        ),
        judge(
            "a negative H between −1 and 0 sharpens at finite depth",
            "the same; oversmoothing “is not inevitable” (abstract)",
            f"at L = {depths}: {'; '.join(told[s] for s in told if -2 < s < 0)}",
            "above its start at L = 24",
            all(curves[s].iloc[-1] > 1 for s in curves if -2 < s < 0),
        ),
        judge(
            "a too negative H = −2.1·I smooths again where A has no negative eigenvalue",
            "not in what we know of the paper; ours: λ_n loses for μ < −2/(1+λ_n)",
            f"at L = {depths}: {'; '.join(told[s] for s in told if s < -2)}",
            falling,
            all(falls[s] for s in falls if s < -2),
        ),
    ]


def _edge(sweep: pd.DataFrame) -> Claim:
    """Between the two borders tokens stay different; beyond them they become equal, as fast as predicted."""
    last = rows(sweep, depth=sweep["depth"].max())
    kept = last[~(last["ratio"] < last["limit"] / 10)]["s"]  # nan: the mean is rounding noise
    edge, step = last["edge"].iloc[0], last["s"].diff().max()
    clear = last[last["rate_said"] < 1 - NEAR].dropna(subset="rate_seen")
    off = (np.log(clear["rate_seen"]) / np.log(clear["rate_said"]) - 1).abs().max()
    return judge(
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
    return judge(
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
        judge(
            "tokens become equal at the rate (second eigenvalue over first)^L",
            "ours, from Def. 4",
            f"{len(equal)} cases: the factor per block agrees to {off.median():.2%} in the median, to "
            f"{off.quantile(0.9):.1%} in 90 % of them (in logarithms)",
            "1 % and 10 %: complex pairs oscillate about the rate, and a fast one ends at rounding early",
            off.median() < 0.01 and off.quantile(0.9) < 0.1,
        ),
        judge(
            "a sharpening H does not raise ‖HFC‖/‖LFC‖ for ever: the ratio ends at that of the dominating mode of A",
            "not in what we know of the paper; ours: modes of A other than 1 have a mean unless A is symmetric",
            f"{len(ends)} cases, limits from {limit.min():.2g} to {limit.max():.3g}, median {limit.median():.2g}; "
            f"largest relative difference {apart:.0e}",
            "1e-6",
            apart < 1e-6,
            when=len(ends) > 0,
        ),
        judge(
            "the theory holds with complex spectra and causal attention too, which the paper's Prop. 1 leaves out",
            "Prop. 1: eigenvalues of A in (−1, 1], real",
            f"{wrong[0]} of {len(unreal)} cases with complex spectra otherwise, {wrong[1]} of {len(causal)} causal "
            "ones",
            "none",
            wrong == [0, 0],
        ),
    ]


STUDY = Study("dovonon2025-theory", Config(), Config(trials=4, points=80, steps=31, cases=8), compute, draw, claims)
