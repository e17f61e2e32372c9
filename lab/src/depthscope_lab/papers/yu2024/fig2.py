"""Yu & Zhang 2024, Fig. 2: similarity, ξ₁/ξ₂ of the four steps, δ and ω, block by block, at initialisation.

Post-norm blocks without W_O (Prop. 2.9), scores over √d (eq. 2), standard normal tokens. dσ² = 1, the theorem's
own choice, fits the figure; §2.4's N(0, h/d) does not (`yu2024-init` shows both). To draw weights is most of the
work: a Gaussian W_V is drawn in law (`root`), and uniform weights where they are multiplied with (`Passing`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
import torch

from depthscope import drawing
from depthscope.measures import ALIKE, EQUAL, TokenMatrix, delta, growth, token_similarity
from depthscope.progress import Share
from depthscope_lab.papers.simulation.blocks import feed, post_norm_block, root
from depthscope_lab.papers.simulation.weights import SETTINGS, Size
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, table

STEPS = ("attention", "norm after attention", "FFN", "norm after FFN")
RATIOS = tuple(f"ratio_{step}" for step in range(1, 5))
CHUNK = 10  # trials at once


@dataclass(frozen=True)
class Config(Size):
    blocks: int = 20
    trials: int = 50
    setting: str = "theorem"


@torch.no_grad()
def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per trial and block: similarity of the block's input, ratio_1 … ratio_4, delta, omega."""
    frames, work = [], Work(config.trials * config.blocks, progress)
    in_law = SETTINGS[config.setting].value.gaussian and config.tokens <= config.width
    value_inputs = config.tokens if in_law else None
    for part, size in config.parts(CHUNK):
        sampler = config.sampler(config.setting, size, part, 0, passing=True, value_inputs=value_inputs)
        x = config.start(size, part, 1)
        for block in range(1, config.blocks + 1):
            at = post_norm_block(sampler.draw(), x, heads=config.heads, values_of=root(x) if in_law else None)
            tokens, p = TokenMatrix(x.squeeze(1)), at.attention.squeeze(1)  # (trials, h, n, n)
            norms = [tokens.norms, *(TokenMatrix(y.squeeze(1)).norms for y in at[1:5])]
            xi = [growth(before, after) for before, after in pairwise(norms)]
            columns = {"similarity": token_similarity(tokens)}
            columns |= {name: one.mean / one.diversity for name, one in zip(RATIOS, xi, strict=True)}
            columns |= {"delta": delta(p).mean(dim=-1), "omega": feed(p, tokens).mean(dim=-1)}  # means over heads
            frames.append(table(columns, block=[block], trial=range(part * CHUNK, part * CHUNK + size)))
            x = at.output
            work(size)
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    """Three plots, as in the paper: means over trials; bands are one standard deviation of the trials."""
    figure, (left, middle, right) = drawing.panels(3, width=3.5, height=3.6)
    by_block = frame.drop(columns="trial").groupby("block")
    mean, spread = by_block.mean(), by_block.std()
    line(left, mean["similarity"], drawing.BLUE, "t_sim of the block's input", spread["similarity"])
    for place, (column, step) in enumerate(zip(RATIOS, STEPS, strict=True)):
        look = {"linestyle": ("-", "--", "-.", ":")[place]}
        line(middle, mean[column], drawing.PALETTE[place], f"{place + 1}: {step}", spread[column], **look)
    for level in (1, 2):
        middle.axhline(level, color=drawing.GREY, linewidth=0.8, zorder=0)
    for column, symbol, colour in (("delta", "δ", drawing.BLUE), ("omega", "ω", drawing.ORANGE)):
        line(right, mean[column], colour, f"{symbol}, mean of the heads", spread[column])
    drawing.legend_below([left, middle, right], columns=1)
    last = mean.index[-1]
    axis(left, "Token similarity", "block", "t_sim(X)", ylim=(0, 1.03), last=last)
    axis(middle, "Escalation in each step", "block", "ξ₁ / ξ₂", last=last)
    axis(right, "Attention's gap", "block", "δ, ω", ylim=(0, None), last=last)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    mean = frame.groupby("block").mean()
    similarity, attention, ends = mean["similarity"], mean["ratio_1"], mean[["delta", "omega"]].iloc[[0, -1]]
    rises, reached = similarity.diff().dropna(), similarity[similarity > EQUAL]
    furthest = (mean[list(RATIOS[1:])] - 1).abs()
    late = furthest[similarity > ALIKE].max().max()
    return [
        judge(
            "t_sim rises from every block to the next",
            "§2.4: “similarity monotonically increases throughout all blocks”",
            f"smallest rise {rises.min():.2e}, from {similarity.iloc[0]:.3f} to {similarity.iloc[-1]:.5f}",
            "every difference of the means > 0",
            (rises > 0).all(),
            f"mean of {frame['trial'].nunique()} trials; dσ² = 1 (initialiser `theorem`), which fits the figure",
        ),
        judge(
            f"t_sim exceeds {EQUAL:g} before block 15",
            "§2.4: “approaching the maximum before block 15”",
            f"first at block {reached.index[0]}" if len(reached) else f"never; {similarity.max():.3f} at most",
            f"“the maximum” taken as t_sim > {EQUAL:g}",
            len(reached) and reached.index[0] < 15,
            when=config.blocks >= 14 or len(reached) > 0,
        ),
        judge(
            "ξ₁/ξ₂ of step 1 is about 2 from the first block on",
            "§2.4: “stays around 2 from the very beginning”",
            f"{attention.iloc[0]:.3f} at block 1; {attention.min():.3f} to {attention.max():.3f} over all blocks",
            "within 0.25 of 2 at every block: “around”, and read off a plot",
            ((attention - 2).abs() < 0.25).all(),
        ),
        judge(
            "ξ₁/ξ₂ of steps 2 to 4 is about 1 at every block",
            "§2.4: “the other three steps have a negligible impact … (since ξ₁/ξ₂ ≈ 1)”",
            f"the FFN step is {mean['ratio_3'].iloc[0]:.3f} at block 1; largest |ξ₁/ξ₂ − 1| "
            f"{furthest.max().max():.3f}, {late:.3f} where t_sim > {ALIKE:g}",
            "within 0.1 of 1: a tenth of what step 1 does",
            furthest.max().max() < 0.1,
            "ReLU's positive mean feeds the mean of the tokens: c/s, which is large while t_sim is small",
        ),
        judge(
            "δ and ω are far less than 1 from the start and tend to 0",
            "§2.4: “δ and ω are far less than 1 from the start and quickly approach 0”",
            "; ".join(
                f"{symbol} {ends[name].iloc[0]:.3f} at block 1, {ends[name].iloc[1]:.1e} at block {mean.index[-1]}"
                for name, symbol in (("delta", "δ"), ("omega", "ω"))
            ),
            "below 0.5 at block 1, and a tenth of that at the last block",
            (ends.iloc[0] < 0.5).all() and (ends.iloc[1] < 0.1 * ends.iloc[0]).all(),
        ),
    ]


STUDY = Study("yu2024-fig2", Config(), Config(tokens=32, width=128, heads=4, trials=10), compute, draw, claims)
