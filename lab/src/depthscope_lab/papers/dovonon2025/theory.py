"""Dovonon et al. 2025, the theory: which eigenvalues 1 + λμ dominate X → X + AXH, against simulation at finite depth.

λ are the eigenvalues of the attention A, μ those of H = W_V W_O. Two parts: the plane of complex μ with the disc
|μ + 1/(1+λ_n)| ≤ 1/(1+λ_n) inside which tokens stay different; and random A, H and X₀ of every kind against the table
of dominating sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLACK, BLUE, VERMILION, circle, legend_below, panels
from depthscope.measures import frequency_ratio
from depthscope.progress import Share
from depthscope.theory import Dominance, dominance_of, mean_wins, pair_eigenvalues
from depthscope_lab.papers.dovonon2025.repeated import F64, Kind, draw_attention, draw_normal, repeat, with_spectrum
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, axis, judge, rows

PLANE_DEPTH = 1536  # blocks
NEAR = 0.01  # of 1: a factor per block this close to it is not distinguished from 1 by so many blocks
RANGE = 1e-12  # of ‖HFC‖/‖LFC‖, and its inverse: beyond it one of the two is rounding noise of the other
EQUAL = 1e-4  # of ‖HFC‖/‖LFC‖

# The random cases.
TOKENS, WIDTH, DEPTH = 6, 4, 4096
RATE_DEPTHS = (*range(64), *range(64, 1025, 16))
SETTLED = 0.99  # by what, per block, the strongest that does not dominate is weaker: 1e-18 is left of it at the end
ALIGNED = 1e-6  # 1 − the least cosine of two tokens
ATTENTIONS: tuple[Kind, ...] = ("similar", "free", "causal")
KINDS = ("positive", "negative", "kernel", "multiple", "skew", "any")
# The rows of the paper's table, as the dominating set decides them, and what follows for generic tokens.
MEAN, MEAN_TOO, ONE, LINE, SEVERAL = (
    "the mean alone",
    "the mean and others",
    "one other i",
    "several other i, one j",
    "several other i and j",
)
SETS = (MEAN, ONE, LINE, SEVERAL, MEAN_TOO)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    points: int = 900  # of the plane
    tokens: int = 12  # of its attention
    cases: int = 100  # of each of 6 kinds of H and 3 kinds of A


def attend(attention: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """X → X + AXH."""
    return lambda x: x + attention @ x @ weights


def measured_rate(depths: Sequence[int], found: Tensor) -> Tensor:
    """The factor per block of ‖HFC‖/‖LFC‖ (depths, trials), by least squares over the later half of what can be seen.

    A curve can be seen as long as it is within `RANGE` and its inverse. nan where fewer than 4 depths are left.
    """
    rates = torch.full(found.shape[1:], torch.nan, dtype=F64)
    for trial, curve in enumerate(found.unbind(dim=1)):
        seen = ((curve > RANGE) & (curve < 1 / RANGE)).int().cumprod(dim=0).bool()
        kept = torch.nonzero(seen).flatten()
        kept = kept[len(kept) // 2 :]
        if len(kept) >= 4:
            at = torch.tensor(depths, dtype=F64)[kept]
            centred = at - at.mean()
            rates[trial] = ((centred * curve[kept].to(F64).log()).sum() / centred.square().sum()).exp()
    return rates


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows of two parts; columns that a part does not have are nan.

    plane: real, imag, equal (what 1536 blocks did), rate_said, inside, centre. case: see `cases`.
    """
    plane = _plane(config).assign(part="plane")
    progress(0.5)
    found = cases(config.cases, (config.seed, 4)).assign(part="case")
    progress(1.0)
    return pd.concat([plane, found], ignore_index=True)


def _plane(config: Config) -> pd.DataFrame:
    """H = [[a, b], [−b, a]] has the eigenvalues a ± ib. One A, whose spectrum is real."""
    (a,) = draw_attention("similar", 1, config.tokens, (config.seed, 2, 0))
    where = np.random.default_rng((config.seed, 2)).uniform((-3, -2), (1, 2), (config.points, 2))
    real, imag = torch.from_numpy(where).unbind(dim=1)
    h = torch.stack([torch.stack([real, imag], dim=-1), torch.stack([-imag, real], dim=-1)], dim=-2)
    start = draw_normal(config.points, config.tokens, 2, seed=(config.seed, 2, 1))
    (end,) = repeat(attend(a, h), start, (PLANE_DEPTH,), rescale=True)
    smallest = torch.linalg.eigvals(a).real.min()
    columns = {
        "real": real.numpy(),
        "imag": imag.numpy(),
        "equal": (frequency_ratio(end) < EQUAL).numpy(),
        "rate_said": [dominance_of(a, matrix).rate for matrix in h],
        "inside": ~mean_wins(smallest, torch.complex(real, imag)).numpy(),
        "centre": -1 / (1 + smallest).item(),
    }
    return pd.DataFrame(columns)


def draw_weights(kind: str, trials: int, seed: tuple[int, ...]) -> Tensor:
    """H of a kind, (trials, d, d). All but "skew" and "any" have real eigenvalues.

    "positive": μ in [0, 1]. "negative": μ in [−1, 0). "kernel": half of μ zero, the others in [−1, −.3]. "multiple":
    H = sI with s in [−3, 1]. "skew": Hᵀ = −H, μ imaginary. "any": independent normal entries.
    """
    if kind in ("positive", "negative", "kernel"):
        sizes = draw_normal(trials, WIDTH, seed=(*seed, 1)).abs().clamp(max=1)
        signed = sizes if kind == "positive" else -sizes
        if kind == "kernel":
            signed = torch.where(torch.arange(WIDTH) < WIDTH // 2, 0.0, signed.clamp(max=-0.3))
        return with_spectrum(signed, (*seed, 2))
    if kind == "multiple":
        return torch.linspace(-3, 1, trials, dtype=F64)[:, None, None] * torch.eye(WIDTH, dtype=F64)
    h = draw_normal(trials, WIDTH, WIDTH, seed=(*seed, 1))
    return h - h.mT if kind == "skew" else h


def cases(trials: int, seed: tuple[int, ...]) -> pd.DataFrame:
    """One row per case, `trials` of each kind of H and of A: the dominating set, what it says, and what was seen.

    `settled` is False where `DEPTH` blocks are too few for the largest eigenvalue to show. `rate` is the factor per
    block of ‖HFC‖/‖LFC‖, `limit` where that ends if one mode of A dominates: at this mode's own ratio. Neither is said
    where the other is.
    """
    kinds = [(kind, attention) for kind in KINDS for attention in ATTENTIONS]
    seeds = [(*seed, number) for number in range(len(kinds))]
    a = torch.cat([draw_attention(kind, trials, TOKENS, (*s, 0)) for (_, kind), s in zip(kinds, seeds, strict=True)])
    h = torch.cat([draw_weights(kind, trials, s) for (kind, _), s in zip(kinds, seeds, strict=True)])
    start = draw_normal(len(a), TOKENS, WIDTH, seed=seed)
    *curves, end = repeat(attend(a, h), start, (*RATE_DEPTHS, DEPTH), rescale=True)
    seen_rate = measured_rate(RATE_DEPTHS, torch.stack([frequency_ratio(x) for x in curves]))
    sigma = torch.linalg.svdvals(end)
    directions = end / torch.linalg.vector_norm(end, dim=-1, keepdim=True)  # a token that has vanished has none
    said = [dominance_of(*pair) for pair in zip(a, h, strict=True)]
    columns = {
        "kind": [kind for kind, _ in kinds for _ in range(trials)],
        "dominating": [dominating_set(one) for one in said],
        "input_said": [one.input_convergence for one in said],
        "angle_said": [one.angle_convergence for one in said],
        "rank_said": [-1 if one.rank is None else one.rank for one in said],
        "rate_said": [one.rate if one.input_convergence else torch.nan for one in said],
        "limit_said": [_limit(one, matrix) for one, matrix in zip(said, a, strict=True)],
        "input_seen": (frequency_ratio(end) < EQUAL).numpy(),
        "angle_seen": ((directions @ directions.mT).flatten(1).amin(dim=1) > 1 - ALIGNED).numpy(),
        "rank_seen": (sigma > ALIGNED * sigma[:, :1]).sum(dim=1).numpy(),
        "rate_seen": seen_rate.numpy(),
        "limit_seen": frequency_ratio(end).numpy(),
        "settled": [_is_settled(*pair) for pair in zip(a, h, strict=True)],
    }
    frame = pd.DataFrame(columns)
    # Where the theory says nothing (angle None, rank −1) anything agrees.
    angle = frame["angle_said"].isna() | (frame["angle_said"] == frame["angle_seen"])
    rank = (frame["rank_said"] < 0) | (frame["rank_said"] == frame["rank_seen"])
    return frame.assign(agrees=(frame["input_said"] == frame["input_seen"]) & angle & rank)


def _limit(said: Dominance, a: Tensor) -> float:
    """‖HFC‖/‖LFC‖ of the one mode of A that dominates, if it is not the mean; its eigenvalue is then real."""
    if dominating_set(said) != ONE:
        return torch.nan
    values, vectors = torch.linalg.eig(a)
    mode = vectors[:, (values - 1).abs().argsort()[said.pairs[0][0]]].real
    return frequency_ratio(mode[:, None]).item()


def dominating_set(said: Dominance) -> str:
    """Which row of the table a case belongs to."""
    modes, columns = {i for i, _ in said.pairs}, {j for _, j in said.pairs}
    if 0 in modes:
        return MEAN if len(modes) == 1 else MEAN_TOO
    return ONE if len(modes) == 1 else LINE if len(columns) == 1 else SEVERAL


def _is_settled(a: Tensor, h: Tensor) -> bool:
    moduli = pair_eigenvalues(torch.linalg.eigvals(a), torch.linalg.eigvals(h)).abs().flatten()
    below = moduli[moduli < (1 - 1e-7) * moduli.max()]
    return not len(below) or bool(below.max() < SETTLED * moduli.max())


def draw(frame: pd.DataFrame) -> Any:
    figure, (disc, sets) = panels(2, width=4.8, height=3.9)
    plane, found = rows(frame, part="plane"), rows(frame, part="case", settled=True)
    for equal, colour, name in ((True, BLUE, "simulated: tokens become equal"), (False, VERMILION, "simulated: not")):
        own = rows(plane, equal=equal)
        disc.plot(own["real"], own["imag"], ".", color=colour, markersize=4, label=name)
    centre = plane["centre"].iloc[0]
    circle(disc, centre, -centre, colour=BLACK, name="|μ + 1/(1+λₙ)| = 1/(1+λₙ)")
    axis(disc, "Eigenvalues μ of H, λ real", "Re μ", "Im μ", aspect="equal")
    for place, name in enumerate(reversed(SETS)):
        own = rows(found, dominating=name)
        right = len(rows(own, agrees=True))
        sets.barh(place, right, color=BLUE, label=None if place else "as the theory says")
        sets.barh(place, len(own) - right, left=right, color=VERMILION, label=None if place else "otherwise")
        sets.text(len(own), place, f" {right} of {len(own)}", va="center", fontsize=8)
    sets.set_yticks(range(len(SETS)), reversed(SETS))
    most = 1.2 * found["dominating"].value_counts().max()
    axis(sets, f"Random A, H, X₀ after {DEPTH} blocks", "cases", "what dominates", xlim=(0, most))
    legend_below(disc, columns=1)
    legend_below(sets)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    parts = {str(name): own.dropna(axis="columns", how="all") for name, own in frame.groupby("part")}
    flags = ["settled", "input_seen", "input_said", "angle_seen", "agrees"]
    found = parts["case"].astype(dict.fromkeys(flags, bool))
    plane = parts["plane"].astype({"equal": bool, "inside": bool})
    clear = plane[(plane["rate_said"] - 1).abs() > NEAR]
    wrong = int((clear["equal"] == clear["inside"]).sum())
    negative = rows(found, kind="negative")
    seen, should = negative["input_seen"].sum(), negative["input_said"].sum()
    settled = rows(found, settled=True)
    equal = rows(settled, input_said=True).dropna(subset=["rate_said", "rate_seen"])
    logs = equal[["rate_seen", "rate_said"]].astype(float).apply(np.log)
    off = (logs["rate_seen"] / logs["rate_said"] - 1).abs()
    ends = settled.dropna(subset=["limit_said", "limit_seen"])
    limit, apart = ends["limit_said"], (ends["limit_seen"] / ends["limit_said"] - 1).abs().max()
    return [
        judge(
            "tokens become equal exactly outside the disc |μ + 1/(1+λ_n)| ≤ 1/(1+λ_n)",
            "the paper's condition on λ^H, made exact by us, for complex μ and real λ",
            f"{wrong} of {len(clear)} points on the wrong side; {len(plane) - len(clear)} within {NEAR:.0%} of "
            "the border are not judged",
            "none",
            wrong == 0,
        ),
        judge(
            "H with all eigenvalues in [−1, 0) never makes tokens equal, whatever A",
            "the sharpening parameterisation Λ_H in [−1, 0]; ours: |1 + λμ| ≥ 1 − |λ||μ| > 1 − |μ| for |λ| < 1",
            f"{seen} of {len(negative)} cases became equal in 4096 blocks, complex and causal A too; {should} should",
            "none",
            seen == should == 0,
        ),
        *(_row(rows(settled, dominating=name), name) for name in SETS),
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
    ]


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


STUDY = Study("dovonon2025-theory", Config(), Config(points=80, cases=8), compute, draw, claims)
