"""The local rate of Yu & Zhang 2024 (§2.5, Remark 2.8): t_div shrinks by 1/(1 + α²) per block, once tokens are alike.

The paper states it and shows no figure. Post-norm blocks, with and without the FFN, for several α, all
through the same weights, in float64 from random tokens down to rounding: differences of tokens end at
1e-16 of the tokens, so t_div, their square, at about 1e-32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from depthscope.drawing import BLACK, PALETTE, legend_below, panels
from depthscope.measures import token_diversity
from depthscope.progress import Share
from depthscope.theory import asymptotic_rate
from depthscope_lab.papers.simulation.blocks import attention_half, ffn_half
from depthscope_lab.papers.simulation.collapse_rate import FLOOR, LOCAL, Fit, allowed, fit, walk
from depthscope_lab.papers.simulation.weights import Size
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, axis, judge, line, rows, table

CHUNK = 16  # trials at a time: their weights are 0.1 GB at width 256
VARIANTS = ("attention", "attention + FFN")
_KEYS = ["variant", "alpha"]


@dataclass(frozen=True)
class Config(Size):
    trials: int = 8
    alphas: tuple[float, ...] = (0.5, 1.0, 1.5)
    depth: int = 240  # α = 0.5 needs as many; a curve ends where all its trials are at rounding
    width: int = 256


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per variant, α, trial and block: t_div of what leaves the block.

    The same for all trials of a curve: `mean_diversity`, the geometric mean of t_div, nan where all are 0;
    `share_left`, its ratio to the block before, both inside the window of the fit, else nan; `predicted_share`.
    """
    frames = []
    for part, trials in (parts := config.parts(CHUNK)):
        sampler = config.sampler("theorem", trials, 9, part, 0, dtype=torch.float64)
        start = config.start(trials, 9, part, 1, dtype=torch.float64)
        start = start.expand(-1, len(config.alphas), -1, -1)  # (trials, α, n, d)
        curves = dict.fromkeys(VARIANTS, (config.alphas, start))
        for block in range(config.depth + 1):
            weights = sampler.draw() if block else None
            for variant, (alphas, x) in curves.items():
                if not alphas:
                    continue
                if weights is not None:
                    strength = torch.tensor(alphas, dtype=x.dtype)[:, None, None]
                    x = attention_half(weights, x, heads=config.heads, alpha=strength)
                    x = x if variant == VARIANTS[0] else ffn_half(weights, x)
                diversity, first = token_diversity(x), part * CHUNK
                places = {"block": [block], "trial": range(first, first + trials), "alpha": alphas}
                frames.append(table({"diversity": diversity}, **places).assign(variant=variant))
                # An α whose trials are all at rounding needs no more blocks.
                kept = [i for i, most in enumerate(diversity.amax(dim=0).tolist()) if most > FLOOR / 100]
                curves[variant] = (tuple(alphas[i] for i in kept), x[:, kept])
            progress((part + block / config.depth) / len(parts))
    frame = pd.concat(frames, ignore_index=True)
    positive = frame[frame["diversity"] > 0]
    mean = np.exp(np.log(positive["diversity"]).groupby([positive[key] for key in (*_KEYS, "block")]).mean())
    local = mean[(mean < LOCAL) & (mean > FLOOR)]
    columns = pd.DataFrame({"mean_diversity": mean, "share_left": local / local.groupby(_KEYS).shift(1)})
    frame = frame.join(columns, on=[*_KEYS, "block"])
    return frame.assign(predicted_share=frame["alpha"].map(asymptotic_rate))


def draw(frame: pd.DataFrame) -> Any:
    figure, (left, right) = panels(2, width=4.8, height=4.0)
    curves = frame.dropna(subset="mean_diversity").drop_duplicates([*_KEYS, "block"]).set_index("block")
    for alpha, colour in zip(sorted(frame["alpha"].unique()), PALETTE, strict=False):
        for variant, dashes in zip(VARIANTS, ("-", "--"), strict=True):
            seen = rows(curves, variant=variant, alpha=alpha)["mean_diversity"]
            line(left, seen, colour, f"α = {alpha:g}, {variant}", linestyle=dashes)
        alone = rows(curves, variant=VARIANTS[0], alpha=alpha)
        line(right, alone["share_left"].dropna(), colour, f"α = {alpha:g}", linewidth=1.2)
        right.axhline(alone["predicted_share"].iloc[0], color=BLACK, linewidth=1, linestyle=":")
    right.plot([], [], color=BLACK, linewidth=1, linestyle=":", label="1/(1 + α²)")
    y = "t_div, geometric mean over trials"
    axis(left, "Diversity to the end of float64", "block", y, log=True, xlim=(0, None))
    axis(right, "What one block leaves of it (no FFN)", "block", "t_div(b) / t_div(b − 1)", ylim=(0, 1))
    legend_below([left, right], columns=2)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    plain, fed = ({alpha: fit(frame, name, alpha) for alpha in config.alphas} for name in VARIANTS)
    one, lasts, long = plain.get(1.0), "not reached", None
    if one is not None:
        lasts = f"{one.blocks} blocks to {one.least:.0e}; second half over first half of the rate {one.bend:.3f}"
        long = one.blocks >= 60 and one.least < 1e-17 and abs(one.bend - 1) < 0.1
    return [
        judge(
            "t_div keeps halving over 60 blocks and more, down to 1e-17 and below",
            "“fast linear convergence” (§2.5)",
            lasts,
            "60 blocks in the window, 1e-17, both halves within 10 %",
            long,
            lacks="" if config.depth >= 90 else "needs 90 blocks",
        ),
        judge(
            "t_div shrinks by the factor 1/(1 + α²) per block, for every α",
            "Remark 2.8 and eq. 17 with λ₂ = 0; “reaches 1/2 when α = 1” (§2.5)",
            _say(plain),
            "3 standard errors of the walk that log t_div does at this width, for each α",
            _agree(plain, config, 1.0),
            "float64 ends after about 50 blocks at α = 1.5, whatever the depth",
        ),
        judge(
            "the FFN does not change the rate at which t_div shrinks",
            "“Other Steps Do Not Impact TSE” (§2.3)",
            _say(fed),
            "1.5 times that: the FFN adds a scatter of its own",
            _agree(fed, config, 1.5),
            "early it does: with the FFN diversity is lower from the first blocks on (ReLU feeds the mean)",
        ),
    ]


def _say(fits: dict[float, Fit | None]) -> str:
    return ", ".join(
        f"α = {alpha:g}: {'not reached' if found is None else f'{found.rate:.3f}'} ({asymptotic_rate(alpha):.3f})"
        for alpha, found in fits.items()
    )


def _agree(fits: dict[float, Fit | None], config: Config, slack: float) -> bool | None:
    """Whether every rate that was reached is the theory's; None if none was."""
    agrees = [
        abs(found.rate / asymptotic_rate(alpha) - 1)
        < slack * allowed(walk(alpha, config.width), found.blocks, config.trials)
        for alpha, found in fits.items()
        if found is not None
    ]
    return all(agrees) if agrees else None


QUICK = Config(trials=3, alphas=(1.0, 1.5), depth=95, tokens=16, width=64, heads=4)
STUDY = Study("yu2024-rate", Config(), QUICK, compute, draw, claims)
