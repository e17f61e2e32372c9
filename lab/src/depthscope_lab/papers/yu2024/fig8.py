"""Yu & Zhang 2024, Fig. 8: how far the mean of ξ₁/ξ₂ is from the ratio of expectations, for small widths.

X = evᵀ + tQ, e = 1/√n·(1 … 1): from rank one (t → 0) to a perturbation of full size. The paper does not say how v
and Q are drawn; here both are standard normal. One attention head, softmax of U(−1, 1)/√d weights, W ~ N(0, 1/d).

The mean of 50 samples of η scatters by about 0.1 at d = 10, a hundred times E[η]. Beside it stands the same mean
with the first-order scatter taken out, whose expectation is known to be 0 (`without_scatter`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from depthscope import drawing
from depthscope.measures import Growth, growth
from depthscope.progress import Share
from depthscope.theory import eta, expected_eta, expected_growth
from depthscope_lab.papers.simulation.randomness import fill_uniform, generators
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, rows

SMALL, LARGE = 0.1, 0.8  # “t is small” and “t is close to 1”


@dataclass(frozen=True)
class Config:
    tokens: int = 100
    widths: tuple[int, ...] = (10, 20, 40)
    points: int = 25  # values of t in (0, 1]
    trials: int = 50  # samples of W for each X
    repeats: int = 40  # draws of v, Q, W_q, W_k; the paper shows one
    seed: int = 0


@torch.no_grad()
def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per width, repeat and t: the mean of η, plain and without scatter, and E[η] to second order.

    `…_size` is the root mean square of each over the repeats, the same for all repeats of a width and a t.
    """
    t = torch.linspace(1 / config.points, 1, config.points, dtype=torch.float64)
    frames, advance = [], Work(len(config.widths) * config.repeats, progress)
    for width, repeat in product(config.widths, range(config.repeats)):
        (stream,) = generators((config.seed, width, repeat), 1)
        v, q = (torch.from_numpy(stream.standard_normal(shape)) for shape in (width, (config.tokens, width)))
        x = v / math.sqrt(config.tokens) + t[:, None, None] * q  # evᵀ + tQ for every t, (t, n, d)
        w_qk = torch.empty(2, width, width, dtype=torch.float64)
        fill_uniform(w_qk, width**-0.5, stream)
        p = torch.softmax((x @ w_qk[0]) @ (x @ w_qk[1]).mT / math.sqrt(width), dim=-1)  # eq. 2, (t, n, n)
        w = torch.from_numpy(stream.standard_normal((config.trials, 1, width, width))) * width**-0.5
        observed, expected = growth(x, x + (p @ x) @ w), expected_growth(p, x)
        columns = {"t": t.tolist(), "expected": expected_eta(p, x).tolist()}
        for name, mean_of in (("plain", eta), ("controlled", without_scatter)):
            samples = mean_of(observed, expected)  # (trials, t)
            columns[name] = samples.mean(dim=0).tolist()
            columns[f"{name}_error"] = (samples.std(dim=0) / math.sqrt(config.trials)).tolist()
        frames.append(pd.DataFrame(columns).assign(width=width, repeat=repeat))
        advance()
    frame = pd.concat(frames, ignore_index=True)
    return frame.join(_size(frame).add_suffix("_size"), on=["width", "t"])


def without_scatter(observed: Growth, expected: Growth) -> Tensor:
    """η + (ξ₁ − E[ξ₁])/E[ξ₂] − E[ξ₁](ξ₂ − E[ξ₂])/E[ξ₂]²: η without its first-order part, which averages to 0.

    E[ξ_i] is known exactly (Lemma 2.4), so this has the expectation of η (a control variate) and only its
    second-order scatter.
    """
    first = (observed.mean - expected.mean) / expected.diversity
    second = expected.mean * (observed.diversity - expected.diversity) / expected.diversity.square()
    return eta(observed, expected) + first - second


def draw(frame: pd.DataFrame) -> Any:
    """Left: one draw of v and Q, as in the paper. Right: the size of E[η], over all draws."""
    figure, (left, right) = drawing.panels(2, width=4.4, height=3.7)
    colours = (drawing.BLUE, drawing.ORANGE, drawing.VERMILION)
    for width, colour, dashes in zip(sorted(frame["width"].unique()), colours, ("-", "--", "-."), strict=True):
        one, name = rows(frame, width=width, repeat=0).set_index("t"), f"d = {width}"
        line(left, one["plain"], colour, f"{name}, ± 1 s.e.", one["plain_error"], linestyle=dashes)
        line(right, one["expected_size"], colour, f"{name}, our E[η]", linestyle=dashes)
        line(right, one["controlled_size"], colour, f"{name}, sampled", linestyle=":", linewidth=1.0)
    left.axhline(0, color=drawing.GREY, linewidth=0.8, zorder=0)
    axis(left, "One draw of v and Q: mean over W", "t", "mean η, as in the paper")
    axis(right, "All draws: E[η], and mean η without scatter", "t", "root mean square", log=True)
    drawing.legend_below(left, columns=1)
    drawing.legend_below(right, columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    size = _size(frame).reset_index().pivot(index="t", columns="width")
    small, large = size[size.index <= SMALL].mean(), size[size.index >= LARGE].mean()
    low, high, widths = small["controlled"], large["controlled"], sorted(frame["width"].unique())
    d = widths[0]
    error = frame[(frame["width"] == d) & (frame["t"] <= SMALL)]["plain_error"].mean()
    end = frame[frame["t"] == frame["t"].max()]
    rms = (((end["controlled"] - end["expected"]) / end["controlled_error"]) ** 2).mean() ** 0.5
    return [
        judge(
            f"(a) for t ≤ {SMALL} E[η] is close to 0 even for d = {d}",
            "App. A.3: “(a) when t is small … E[η] is close to 0 even for d = 10”",
            f"root mean square {low[d]:.1e} with the scatter taken out",
            "below 0.01, a hundredth of the ξ₁/ξ₂ − 1 ≈ 1 that it corrects",
            low[d] < 0.01,
            "over draws of v and Q; mean over the values of t",
        ),
        judge(
            f"(b) for t ≥ {LARGE} E[η] varies more than for t ≤ {SMALL}",
            "App. A.3: “(b) … when t is close to 1, E[η] varies more significantly”",
            f"d = {d}: {high[d]:.1e} against {low[d]:.1e} for t ≤ {SMALL}",
            "at least twice as large",
            high[d] > 2 * low[d],
        ),
        judge(
            f"(c) E[η] gets closer to 0 with d, also for t ≥ {LARGE}",
            "App. A.3: “(c) as d increases, E[η] becomes closer to 0 even for larger t values”",
            "mean without scatter " + ", ".join(f"{high[width]:.1e} (d = {width})" for width in widths),
            "at most 0.7 of it with every doubling of d; 1/√d would be 0.71",
            all(high[b] < 0.7 * high[a] for a, b in pairwise(widths)),
            "the mean without scatter still holds its own sampling error, so it bounds |E[η]| from above",
        ),
        judge(
            f"the plain mean of {config.trials} samples of η shows (a) and (b)",
            f"Fig. 8: averages of η “over {config.trials} samples of W”",
            f"d = {d}: {small['plain'][d]:.3f} for t ≤ {SMALL}, {large['plain'][d]:.3f} for t ≥ {LARGE}; "
            f"its standard error is {error:.3f}",
            "(a) below 0.01 and (b) at least twice as large, as above",
            small["plain"][d] < 0.01 and large["plain"][d] > 2 * small["plain"][d],
            "what the plain mean shows is sampling error at every t; it shrinks with d, as (c) says",
        ),
        judge(
            "our second-order E[η] is the mean of η without scatter",
            "ours; the paper only shows that E[η] is small",
            f"t = 1: root mean square of (mean − E[η])/standard error {rms:.2f}, {len(end)} draws of v and Q",
            "1.5: it is 1 if the mean is right and its error normal",
            rms < 1.5,
        ),
    ]


def _size(frame: pd.DataFrame) -> pd.DataFrame:
    """Root mean squares over the draws of v and Q, by width and t."""
    return (frame[["plain", "controlled", "expected"]] ** 2).groupby([frame["width"], frame["t"]]).mean() ** 0.5


STUDY = Study("yu2024-fig8", Config(), Config(tokens=50, points=10, repeats=12), compute, draw, claims)
