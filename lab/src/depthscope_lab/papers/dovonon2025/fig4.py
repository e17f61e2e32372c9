"""Dovonon et al. 2025, Fig. 4: repeated layers with layer norm, whose weights are all positive or all negative.

What must happen when the weights γ change their sign, for one attention A or for softmax of bilinear scores:

- *pre-norm*, X + A·LN(X)·H with LN(x) = γ∘(x − x̄)/σ(x): what acts on the tokens is (I − 11ᵀ/d)diag(γ)H, so that −γ is
  the same as −H, exactly, and its spectrum is negated.
- *post-norm*, LN(X + AXH): the map is odd in X, and −γ turns X_L into (−1)^L X_L. No measure of similarity changes.
  Bilinear scores XWXᵀ do not change either.
- With a bias the map is neither: LN(x) + β, or a bias of the queries, whose scores bW_KᵀXᵀ change sign with X.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.drawing import BLUE, VERMILION, block_axis, label, panels, shared_legend
from depthscope.measures import frequency_ratio
from depthscope.progress import Share
from depthscope_lab.papers.dovonon2025.repeated import F64, draw_attention, draw_normal, repeat, with_spectrum
from depthscope_lab.papers.study import Claim, Study, judge

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


@dataclass(frozen=True)
class Drawn:
    """What all cases share, (trials, …): the same numbers with either sign of γ and of H."""

    tokens: Tensor  # (n, d)
    attention: Tensor  # softmax(YYᵀ/√d) of other tokens Y, (n, n), for `FIXED`: large on its diagonal
    free: Tensor  # softmax of independent scores, for `FREE`
    scores: Tensor  # W_Q W_Kᵀ/√d, (d, d)
    query_bias: Tensor  # b W_Kᵀ/√d, (1, d)
    weights: Tensor  # H with eigenvalues in [0, 1]
    gain: Tensor  # |γ|, (1, d)
    bias: Tensor  # β, (1, d)


def draw_all(config: Config) -> Drawn:
    n, d, trials = config.tokens, config.width, config.trials
    sizes = torch.rand(trials, d, dtype=F64, generator=torch.Generator().manual_seed(config.seed))
    return Drawn(
        tokens=draw_normal(trials, n, d, seed=(config.seed, 0)),
        attention=draw_attention("similar", trials, n, (config.seed, 1)),
        free=draw_attention("free", trials, n, (config.seed, 7)),
        scores=draw_normal(trials, d, d, seed=(config.seed, 2)) / d,
        query_bias=draw_normal(trials, 1, d, seed=(config.seed, 3)) / d**0.5,
        weights=with_spectrum(sizes, (config.seed, 4)),
        gain=0.5 + draw_normal(trials, 1, d, seed=(config.seed, 5)).abs() / 2,
        bias=draw_normal(trials, 1, d, seed=(config.seed, 6)) / 2,
    )


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None) -> Tensor:
    """γ∘(x − x̄)/√(σ² + ε) + β over features, (…, n, d); γ and β (…, 1, d) differ from trial to trial."""
    normed = gain * F.layer_norm(x, x.shape[-1:])
    return normed if bias is None else normed + bias


def layer(drawn: Drawn, placement: Placement, setting: str, gain: int, weights: int) -> Callable[[Tensor], Tensor]:
    """One layer, with the signs of γ and of H."""
    bias = drawn.bias if setting == NORM_BIAS else None
    h = weights * drawn.weights

    def norm(x: Tensor) -> Tensor:
        return layer_norm(x, gain * drawn.gain, bias)

    def attend(x: Tensor) -> Tensor:
        if setting in (FIXED, NORM_BIAS):
            return drawn.attention @ x @ h
        if setting == FREE:
            return drawn.free @ x @ h
        scores = x @ drawn.scores @ x.mT
        if setting == QUERY_BIAS:
            scores = scores + drawn.query_bias @ x.mT
        return scores.softmax(dim=-1) @ x @ h

    return (lambda x: x + attend(norm(x))) if placement == "pre" else (lambda x: norm(x + attend(x)))


def effective_weights(drawn: Drawn, gain: int, weights: int) -> Tensor:
    """(I − 11ᵀ/d)diag(γ)H, which acts on the tokens in pre-norm; their sizes apart, which LN takes out."""
    scaled = gain * drawn.gain.mT * (weights * drawn.weights)
    return scaled - scaled.mean(dim=-2, keepdim=True)


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: placement, setting, spectrum, sign, block, trial, ratio (‖HFC‖/‖LFC‖), negative (share of the
    eigenvalues with Re < 0 of the effective H, those that are zero left out; pre-norm only)."""
    drawn = draw_all(config)
    depths = sorted({*range(0, min(config.depth, 40), 4), *range(0, config.depth + 1, 20), config.depth})
    frames, done = [], 0
    for placement in PLACEMENTS:
        for setting in SETTINGS:
            for spectrum, h in SPECTRA.items():
                for sign, gain in SIGNS.items():
                    found = repeat(layer(drawn, placement, setting, gain, h), drawn.tokens, depths, rescale=False)
                    about = {"placement": placement, "setting": setting, "spectrum": spectrum, "sign": sign}
                    negative = _negative(drawn, gain, h) if placement == "pre" else torch.nan
                    frames += [
                        _rows(x, depth).assign(**about, negative=negative)
                        for x, depth in zip(found, depths, strict=True)
                    ]
                    done += 1
                    progress(done / (4 * len(PLACEMENTS) * len(SETTINGS)))
    return pd.concat(frames, ignore_index=True)


def _rows(tokens: Tensor, depth: int) -> pd.DataFrame:
    return pd.DataFrame({"block": depth, "trial": range(len(tokens)), "ratio": frequency_ratio(tokens).numpy()})


def _negative(drawn: Drawn, gain: int, weights: int) -> float:
    values = torch.linalg.eigvals(effective_weights(drawn, gain, weights))
    counted = values.abs() > 1e-9
    return ((values.real < 0) & counted).sum().item() / counted.sum().item()


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(5, 2, width=3.0, height=2.9)
    colours = dict(zip(SPECTRA, (BLUE, VERMILION), strict=True))
    places = [(placement, setting) for placement in PLACEMENTS for setting in SETTINGS]
    for ax, (placement, setting) in zip(axes, places, strict=True):
        own = frame[(frame["placement"] == placement) & (frame["setting"] == setting)]
        for spectrum, sign in ((spectrum, sign) for spectrum in SPECTRA for sign in SIGNS):
            curve = own[(own["spectrum"] == spectrum) & (own["sign"] == sign)].groupby("block")["ratio"].median()
            style = {"linewidth": 3.2, "alpha": 0.55} if sign == "γ > 0" else {"linewidth": 1.4, "linestyle": "--"}
            ax.plot(curve.index, curve, color=colours[spectrum], label=f"H in {spectrum}, {sign}", **style)
        ax.set_yscale("log")
        ax.set_ylim(SHOWN[placement])
        block_axis(ax, int(frame["block"].max()), first=0)
        label(ax, f"{placement}-norm, {setting}", "block", "‖HFC‖/‖LFC‖, median" if setting == FIXED else "")
    shared_legend(figure, axes[0], columns=4)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    cases = {
        key: rows.pivot(index="block", columns="trial", values="ratio")
        for key, rows in frame.groupby(["placement", "setting", "spectrum", "sign"])
    }
    plus, minus = SPECTRA
    return [
        _identity(_largest(cases, "pre", WITHOUT_BIAS, (plus, "γ < 0"), (minus, "γ > 0"))),
        _spectrum(frame),
        *(_influence(cases, config, setting) for setting in WITHOUT_BIAS),
        *(_odd(cases, setting) for setting in WITHOUT_BIAS),
        *(_bias(cases, config, setting) for setting in (NORM_BIAS, QUERY_BIAS)),
        *(_post(cases, config, setting) for setting in WITHOUT_BIAS),
    ]


Cases = dict[Any, pd.DataFrame]


def _largest(
    cases: Cases, placement: str, settings: tuple[str, ...], one: tuple[str, str], other: tuple[str, str]
) -> float:
    """The largest relative difference of the ratio between two cases, over all layers and draws."""
    return max(
        float((cases[placement, setting, *one] / cases[placement, setting, *other] - 1).abs().max().max())
        for setting in settings
    )


def _identity(apart: float) -> Claim:
    return judge(
        "in pre-norm without bias, negative LN weights are the same as a negated H",
        paper="ours, derived: X + A·LN(X)·H has (I − 11ᵀ/d)diag(γ)H on its tokens",
        ours=f"largest relative difference of ‖HFC‖/‖LFC‖ {apart:.0e}, fixed attention and attention of the tokens",
        tolerance="1e-9: rounding",
        holds=apart < 1e-9,
    )


def _spectrum(frame: pd.DataFrame) -> Claim:
    shares = frame[frame["placement"] == "pre"].groupby(["spectrum", "sign"])["negative"].first()
    plus, minus = SPECTRA
    mirrored = all(abs(shares[h, "γ > 0"] + shares[h, "γ < 0"] - 1) < 1e-12 for h in SPECTRA)
    return judge(
        "in pre-norm, changing the sign of LN's weights negates the spectrum of the effective H",
        paper="ours, derived; “the sign of layer normalization weights can influence this effect” (abstract)",
        ours=f"negative share of the eigenvalues, H in {plus}: {shares[plus, 'γ > 0']:.1%} with γ > 0, "
        f"{shares[plus, 'γ < 0']:.1%} with γ < 0; H in {minus}: {shares[minus, 'γ > 0']:.1%} and "
        f"{shares[minus, 'γ < 0']:.1%}",
        tolerance="the two shares add up to 1; below 10 % and above 90 % for H in [0, 1]",
        holds=bool(mirrored and shares[plus, "γ > 0"] < 0.1 and shares[plus, "γ < 0"] > 0.9),
    )


def _influence(cases: Cases, config: Config, setting: str) -> Claim:
    """At the last layer: medians of the two signs, and in how many draws the order holds."""
    smooth, kept = (cases["pre", setting, "[0, 1]", sign].loc[config.depth] for sign in SIGNS)
    share = float(np.mean(kept > smooth))
    return judge(
        f"in pre-norm, {setting}, the sign of LN's weights decides whether a positive H smooths",
        paper="Fig. 4 and abstract; its numbers are not known to us",
        ours=f"median ‖HFC‖/‖LFC‖ at layer {config.depth}: {smooth.median():.3g} with γ > 0, {kept.median():.3g} with "
        f"γ < 0; γ < 0 keeps more in {share:.0%} of the draws",
        tolerance="in 90 % of the draws, and by a factor of 3 in the median",
        holds=bool(share > 0.9 and kept.median() > 3 * smooth.median()),
        note=STALLS if setting == FIXED else "",
    )


def _odd(cases: Cases, setting: str) -> Claim:
    apart = max(_largest(cases, "post", (setting,), (h, "γ > 0"), (h, "γ < 0")) for h in SPECTRA)
    return judge(
        f"in post-norm without bias, {setting}, the sign of LN's weights changes nothing",
        paper="Fig. 4 has post-norm with either sign; ours, derived: the layer is odd, X_L becomes (−1)^L X_L",
        ours=f"largest relative difference of ‖HFC‖/‖LFC‖ {apart:.0e}",
        tolerance="1e-9: rounding",
        holds=apart < 1e-9,
    )


def _bias(cases: Cases, config: Config, setting: str) -> Claim:
    ends = {(h, sign): cases["post", setting, h, sign].loc[config.depth] for h in SPECTRA for sign in SIGNS}
    moved = {h: ((ends[h, "γ < 0"] / ends[h, "γ > 0"] - 1).abs() > 0.01).mean() for h in SPECTRA}
    return judge(
        f"in post-norm {setting}, the sign of LN's weights changes what becomes of the tokens",
        paper="Fig. 4, as far as its post-norm curves differ",
        ours=f"median ‖HFC‖/‖LFC‖ at layer {config.depth}: "
        + ", ".join(f"H in {h} with {sign} {end.median():.2g}" for (h, sign), end in ends.items())
        + "; changed by more than 1 % in "
        + " and ".join(f"{share:.0%}" for share in moved.values())
        + " of the draws",
        tolerance="by more than 1 % in half of the draws, with one of the two H; without bias it is rounding",
        holds=bool(max(moved.values()) > 0.5),
    )


def _post(cases: Cases, config: Config, setting: str) -> Claim:
    plus, minus = (cases["post", setting, h, "γ > 0"].loc[config.depth] for h in SPECTRA)
    return judge(
        f"in post-norm, {setting}, a positive H smooths and a negative one does not",
        paper="the theory of the update, with LN behind it",
        ours=f"median ‖HFC‖/‖LFC‖ at layer {config.depth}: {plus.median():.2g} for H in [0, 1], "
        f"{minus.median():.2g} for H in [−1, 0]",
        tolerance="below .1 (t_sim .99) and above 1 (t_sim .5)",
        holds=bool(plus.median() < 0.1 and minus.median() > 1),
        note=STALLS if setting == FIXED else "",
    )


STUDY = Study(
    "dovonon2025-fig4",
    full=Config(),
    quick=Config(trials=10, depth=60),
    compute=compute,
    draw=draw,
    claims=claims,
)
