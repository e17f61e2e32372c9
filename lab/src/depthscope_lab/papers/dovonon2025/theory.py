"""Dovonon et al. 2025, the theory: which eigenvalues 1 + λμ dominate X → X + AXH, against simulation at finite depth.

λ are the eigenvalues of the attention A, μ those of H = W_V W_O. Four parts: H = sI over the first 24 blocks against
the closed form; the plane of complex μ with the disc |μ + 1/(1+λ_n)| ≤ 1/(1+λ_n) inside which tokens stay different;
the ratio per block over s, with the place −2/(1+λ_n) where a too negative H smooths again; and random A, H and X₀ of
every kind against the table of dominating sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLACK, BLUE, GREY, PALETTE, VERMILION, block_axis, circle, label, legend_below, panels
from depthscope.measures import frequency_ratio
from depthscope.progress import Share
from depthscope.theory import dominance_of, mean_wins, tokens_after
from depthscope_lab.papers.dovonon2025.repeated import (
    F64,
    attend,
    draw_attention,
    draw_normal,
    measured_rate,
    ratios,
    repeat,
)
from depthscope_lab.papers.dovonon2025.theory_cases import EQUAL, SETS, cases
from depthscope_lab.papers.dovonon2025.theory_claims import claims_of
from depthscope_lab.papers.study import Claim, Study

SCALES = (1.0, 0.2, -0.2, -1.0, -2.1)
DEPTH = 24  # of the first part
DEPTHS = (*range(0, 97, 4), *range(96 + 32, 1537, 32))  # where the factor per block is read
SWEPT = (24, 192, 1536)
NEAR = 0.01  # of 1: a factor per block this close to it is not told from 1 by 1536 blocks


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
    `theory_cases.cases`.
    """
    parts = []
    for number, (name, make) in enumerate(
        {"scale": _scales, "plane": _plane, "sweep": _sweep, "case": lambda c: cases(c.cases, (c.seed, 4))}.items()
    ):
        parts.append(make(config).assign(part=name))
        progress((number + 1) / 4)
    return pd.concat(parts, ignore_index=True)


def _scales(config: Config) -> pd.DataFrame:
    a = draw_attention("similar", config.trials, config.tokens, (config.seed, 1, 0))
    start = draw_normal(config.trials, config.tokens, config.width, seed=(config.seed, 1, 1))
    eye = torch.eye(config.width, dtype=F64)
    first = frequency_ratio(start)
    rows = []
    for s in SCALES:
        found = repeat(attend(a, s * eye), start, range(DEPTH + 1), rescale=False)
        for block, tokens in enumerate(found):
            seen = frequency_ratio(tokens) / first
            closed = frequency_ratio(_closed(start, a, s * eye, block)) / first
            apart = (seen / closed - 1).abs().max().item()
            rows.append((s, block, seen.log().mean().exp().item(), closed.log().mean().exp().item(), apart))
    return pd.DataFrame(rows, columns=["s", "block", "ratio", "closed", "apart"])


def _closed(start: Tensor, a: Tensor, h: Tensor, depth: int) -> Tensor:
    return torch.stack([tokens_after(x, matrix, h, depth) for x, matrix in zip(start, a, strict=True)])


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


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(2, 2, width=4.8, height=3.9)
    _draw_scales(axes[0], frame[frame["part"] == "scale"])
    _draw_plane(axes[1], frame[frame["part"] == "plane"])
    _draw_sweep(axes[2], frame[frame["part"] == "sweep"])
    _draw_cases(axes[3], frame[(frame["part"] == "case") & (frame["settled"] == True)])  # noqa: E712 of mixed columns
    return figure


def _draw_scales(ax: Any, rows: pd.DataFrame) -> None:
    for (s, own), colour in zip(rows.groupby("s", sort=False), PALETTE, strict=False):
        ax.plot(own["block"], own["closed"], color=colour, linewidth=1.4, label=f"s = {s:g}")
        ax.plot(own["block"], own["ratio"], ".", color=colour, markersize=5)
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
    ax.set_yscale("log")
    block_axis(ax, DEPTH, first=0)
    label(ax, "H = sI: closed form (lines), simulated (dots)", "block", "‖HFC‖/‖LFC‖ by its start")
    legend_below(ax, columns=5)


def _draw_plane(ax: Any, rows: pd.DataFrame) -> None:
    centre = rows["centre"].iloc[0]
    for chosen, colour, name in (
        (rows["equal"] == True, BLUE, "simulated: tokens become equal"),  # noqa: E712 of mixed columns
        (rows["equal"] == False, VERMILION, "simulated: not"),  # noqa: E712
    ):
        ax.plot(rows["real"][chosen], rows["imag"][chosen], ".", color=colour, markersize=4, label=name)
    circle(ax, centre, -centre, colour=BLACK, name="|μ + 1/(1+λₙ)| = 1/(1+λₙ)")
    ax.set_aspect("equal")
    label(ax, "Eigenvalues μ of H, λ real", "Re μ", "Im μ")
    legend_below(ax, columns=1)


def _draw_sweep(ax: Any, rows: pd.DataFrame) -> None:
    for border, name in ((rows["edge"].iloc[0], "s = −2/(1+λₙ) and 0"), (0, None)):
        ax.axvline(border, color=BLACK, linewidth=1, linestyle=":", label=name)
    for (depth, own), colour in zip(rows.groupby("depth"), PALETTE, strict=False):
        ax.plot(own["s"], own["ratio"], ".-", color=colour, linewidth=1, markersize=4, label=f"block {depth:g}")
    ax.axhline(rows["limit"].iloc[0], color=GREY, linewidth=1, linestyle="--", label="of the mode of λₙ")
    ax.set_yscale("log")
    ax.set_ylim(1e-6, 1e2)
    label(ax, "H = sI: too negative smooths again", "s", "‖HFC‖/‖LFC‖")
    legend_below(ax, columns=3)


def _draw_cases(ax: Any, rows: pd.DataFrame) -> None:
    for place, name in enumerate(reversed(SETS)):
        own = rows[rows["dominating"] == name]
        right = int((own["agrees"] == True).sum())  # noqa: E712
        ax.barh(place, right, color=BLUE, label="as the theory says" if place == 0 else None)
        ax.barh(place, len(own) - right, left=right, color=VERMILION, label="otherwise" if place == 0 else None)
        ax.text(len(own), place, f" {right} of {len(own)}", va="center", fontsize=8)
    ax.set_yticks(range(len(SETS)), reversed(SETS))
    ax.set_xlim(0, 1.2 * rows["dominating"].value_counts().max())
    label(ax, "Random A, H, X₀ after 4096 blocks", "cases", "what dominates")
    legend_below(ax)


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    return claims_of(frame, near=NEAR)


STUDY = Study(
    "dovonon2025-theory",
    full=Config(),
    quick=Config(trials=4, points=80, steps=31, cases=8),
    compute=compute,
    draw=draw,
    claims=claims,
)
