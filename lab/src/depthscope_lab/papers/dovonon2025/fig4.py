"""Dovonon et al. 2025, Fig. 4: repeated layers with layer norm, whose weights are all positive or all negative.

What must happen when the weights γ change their sign, for one attention A or for softmax of bilinear scores:

- *pre-norm*, X + A·LN(X)·H with LN(x) = γ∘(x − x̄)/σ(x): what acts on the tokens is (I − 11ᵀ/d)diag(γ)H, so that −γ is
  the same as −H, exactly.
- *post-norm*, LN(X + AXH): the map is odd in X, and −γ turns X_L into (−1)^L X_L. No measure of similarity changes.
  Bilinear scores XWXᵀ do not change either.
- With a bias the map is neither: LN(x) + β, or a bias of the queries, whose scores bW_KᵀXᵀ change sign with X.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.drawing import BLUE, VERMILION, panels, shared_legend
from depthscope.measures import frequency_ratio
from depthscope.progress import Share
from depthscope_lab.papers.dovonon2025.repeated import F64, draw_attention, draw_normal, repeat, with_spectrum
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, rows, table

SPECTRA = {"[0, 1]": 1, "[−1, 0]": -1}  # of H, and its sign
SIGNS = {"γ > 0": 1, "γ < 0": -1}
FIXED, FREE, SCORED = "A fixed", "A fixed, free", "A of the tokens"
NORM_BIAS, QUERY_BIAS = "with LN's bias", "with a bias of queries"
WITHOUT_BIAS = (FIXED, FREE, SCORED)
STALLS = (
    "this attention is large on its diagonal, and LN gives every token the same size: a token that attends to itself "
    "keeps its side of zero"
)
SETTINGS = (*WITHOUT_BIAS, NORM_BIAS, QUERY_BIAS)
Placement = Literal["pre", "post"]
PLACEMENTS: tuple[Placement, ...] = ("pre", "post")
SHOWN = {"pre": (2e-3, 50), "post": (1e-17, 100)}  # the y axes


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 200
    depth: int = 300
    tokens: int = 12
    width: int = 8


def draw_all(config: Config) -> SimpleNamespace:
    """What all cases share, (trials, …): the same numbers with either sign of γ and of H."""
    n, d, trials = config.tokens, config.width, config.trials
    sizes = torch.rand(trials, d, dtype=F64, generator=torch.Generator().manual_seed(config.seed))
    return SimpleNamespace(
        tokens=draw_normal(trials, n, d, seed=(config.seed, 0)),
        attention=draw_attention("similar", trials, n, (config.seed, 1)),  # of other tokens: large on its diagonal
        free=draw_attention("free", trials, n, (config.seed, 7)),
        scores=draw_normal(trials, d, d, seed=(config.seed, 2)) / d,  # W_Q W_Kᵀ/√d
        query_bias=draw_normal(trials, 1, d, seed=(config.seed, 3)) / d**0.5,  # b W_Kᵀ/√d
        weights=with_spectrum(sizes, (config.seed, 4)),  # H with eigenvalues in [0, 1]
        gain=0.5 + draw_normal(trials, 1, d, seed=(config.seed, 5)).abs() / 2,  # |γ|
        bias=draw_normal(trials, 1, d, seed=(config.seed, 6)) / 2,  # β
    )


def layer(
    drawn: SimpleNamespace, placement: Placement, setting: str, gain: int, weights: int
) -> Callable[[Tensor], Tensor]:
    """One layer, with the signs of γ and of H. LN(x) = γ∘(x − x̄)/√(σ² + ε) + β, with γ and β of each trial."""

    def norm(x: Tensor) -> Tensor:
        normed = gain * drawn.gain * F.layer_norm(x, x.shape[-1:])
        return normed + drawn.bias if setting == NORM_BIAS else normed

    def attend(x: Tensor) -> Tensor:
        attention = drawn.free if setting == FREE else drawn.attention
        if setting in (SCORED, QUERY_BIAS):
            scores = x @ drawn.scores @ x.mT
            attention = (scores + drawn.query_bias @ x.mT if setting == QUERY_BIAS else scores).softmax(dim=-1)
        return attention @ x @ (weights * drawn.weights)

    return (lambda x: x + attend(norm(x))) if placement == "pre" else (lambda x: norm(x + attend(x)))


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: placement, setting, spectrum, sign, block, trial, ratio (‖HFC‖/‖LFC‖)."""
    drawn = draw_all(config)
    depths = sorted({*range(0, min(config.depth, 40), 4), *range(0, config.depth + 1, 20), config.depth})
    cases = list(product(PLACEMENTS, SETTINGS, SPECTRA, SIGNS))
    frames, work = [], Work(len(cases), progress)
    for placement, setting, spectrum, sign in cases:
        step = layer(drawn, placement, setting, SIGNS[sign], SPECTRA[spectrum])
        ratio = torch.stack([frequency_ratio(x) for x in repeat(step, drawn.tokens, depths, rescale=False)])
        own = table({"ratio": ratio}, block=depths, trial=range(config.trials))
        frames.append(own.assign(placement=placement, setting=setting, spectrum=spectrum, sign=sign))
        work()
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(5, 2, width=3.0, height=2.9)
    last = int(frame["block"].max())
    for ax, (placement, setting) in zip(axes, product(PLACEMENTS, SETTINGS), strict=True):
        for (spectrum, colour), sign in product(zip(SPECTRA, (BLUE, VERMILION), strict=True), SIGNS):
            own = rows(frame, placement=placement, setting=setting, spectrum=spectrum, sign=sign)
            look = {"linewidth": 3.2, "alpha": 0.55} if sign == "γ > 0" else {"linewidth": 1.4, "linestyle": "--"}
            line(ax, own.groupby("block")["ratio"].median(), colour, f"H in {spectrum}, {sign}", **look)
        y = "‖HFC‖/‖LFC‖, median" if setting == FIXED else ""
        axis(ax, f"{placement}-norm, {setting}", "block", y, log=True, ylim=SHOWN[placement], first=0, last=last)
    shared_legend(figure, axes[0], columns=4)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    keys = ["placement", "setting", "spectrum", "sign"]
    cases: dict[Any, pd.DataFrame] = {
        key: own.pivot(index="block", columns="trial", values="ratio") for key, own in frame.groupby(keys)
    }
    ends = {key: own.loc[config.depth] for key, own in cases.items()}
    at, (plus, minus), (positive, negative) = f"median ‖HFC‖/‖LFC‖ at layer {config.depth}: ", SPECTRA, SIGNS

    def apart(placement: str, setting: str, one: tuple[str, str], other: tuple[str, str]) -> float:
        """The largest relative difference of the ratio between two cases, over all layers and draws."""
        return float((cases[placement, setting, *one] / cases[placement, setting, *other] - 1).abs().max().max())

    mirrored = max(apart("pre", setting, (plus, negative), (minus, positive)) for setting in WITHOUT_BIAS)
    odd = max(apart("post", name, (h, positive), (h, negative)) for name, h in product(WITHOUT_BIAS, SPECTRA))

    def pre(setting: str) -> Claim:
        smooth, kept = (ends["pre", setting, plus, sign] for sign in SIGNS)
        order = (kept > smooth).mean()
        return judge(
            f"in pre-norm, {setting}, the sign of LN's weights decides whether a positive H smooths",
            "Fig. 4 and abstract; its numbers are not known to us",
            f"{at}{smooth.median():.3g} with γ > 0, {kept.median():.3g} with γ < 0; γ < 0 keeps more in "
            f"{order:.0%} of the draws",
            "in 90 % of the draws, and by a factor of 3 in the median",
            order > 0.9 and kept.median() > 3 * smooth.median(),
            STALLS if setting == FIXED else "",
        )

    def biased(setting: str) -> Claim:
        own = {pair: ends["post", setting, *pair] for pair in product(SPECTRA, SIGNS)}
        moved = [((own[h, negative] / own[h, positive] - 1).abs() > 0.01).mean() for h in SPECTRA]
        return judge(
            f"in post-norm {setting}, the sign of LN's weights changes what becomes of the tokens",
            "Fig. 4, as far as its post-norm curves differ",
            at
            + ", ".join(f"H in {h} with {sign} {end.median():.2g}" for (h, sign), end in own.items())
            + f"; changed by more than 1 % in {' and '.join(f'{part:.0%}' for part in moved)} of the draws",
            "by more than 1 % in half of the draws, with one of the two H; without bias it is rounding",
            max(moved) > 0.5,
        )

    def post(setting: str) -> Claim:
        smooth, kept = (ends["post", setting, h, positive].median() for h in SPECTRA)
        return judge(
            f"in post-norm, {setting}, a positive H smooths and a negative one does not",
            "the theory of the update, with LN after it",
            f"{at}{smooth:.2g} for H in [0, 1], {kept:.2g} for H in [−1, 0]",
            "below .1 (t_sim .99) and above 1 (t_sim .5)",
            smooth < 0.1 and kept > 1,
            STALLS if setting == FIXED else "",
        )

    return [
        judge(
            "in pre-norm without bias, negative LN weights are the same as a negated H",
            "ours, derived: X + A·LN(X)·H has (I − 11ᵀ/d)diag(γ)H on its tokens",
            f"largest relative difference of ‖HFC‖/‖LFC‖ {mirrored:.0e}, fixed attention and attention of the tokens",
            "1e-9: rounding",
            mirrored < 1e-9,
            kind="check",
        ),
        judge(
            "in post-norm without bias, the sign of LN's weights changes nothing",
            "Fig. 4 has post-norm with either sign; ours, derived: the layer is odd, X_L becomes (−1)^L X_L",
            f"largest relative difference of ‖HFC‖/‖LFC‖ {odd:.0e}, fixed attention and attention of the tokens",
            "1e-9: rounding",
            odd < 1e-9,
            kind="check",
        ),
        *map(pre, WITHOUT_BIAS),
        *map(biased, (NORM_BIAS, QUERY_BIAS)),
        *map(post, WITHOUT_BIAS),
    ]


STUDY = Study("dovonon2025-fig4", Config(), Config(trials=10, depth=60), compute, draw, claims)
