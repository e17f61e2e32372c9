"""Dong et al. 2021, Fig. 5: how many paths of each length an architecture has; the paper's, and some that came later.

A path takes one of H heads or the skip at each of L layers: C(L, k)H^k paths have length k. Drawn at random, a path
takes each layer's skip with probability 1/(H + 1), so that its length is Binomial(L, H/(H + 1)). This counts paths; it
does not say what they carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope.theory import path_counts, path_length_shares
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, rows

ROUNDING = 1e-12  # relative, of float64 in a product of up to 126 factors
RARE = 1e-3  # smaller shares are not drawn
BERT, GPT = "BERT-base, ViT-B", "GPT-3"
MOBILEBERT, PUBLISHED_MOBILEBERT = "MobileBERT", "MobileBERT as published"


class Architecture(NamedTuple):
    """L layers with H attention heads each (query heads, where keys and values are shared)."""

    name: str
    layers: int
    heads: int
    group: str = "paper"  # of Fig. 5; or "later", or "corrected"


ARCHITECTURES = (
    Architecture("DistilBERT", 6, 12),
    Architecture("DeiT-T", 12, 3),
    Architecture(MOBILEBERT, 12, 4),
    Architecture(BERT, 12, 12),
    Architecture("BERT-large, ViT-L", 24, 16),
    Architecture("ViT-H", 32, 16),
    Architecture("T5-3B", 24, 32),  # encoder
    Architecture("T5-11B", 24, 128),  # encoder
    Architecture(GPT, 96, 96),
    Architecture(PUBLISHED_MOBILEBERT, 24, 4, "corrected"),  # Sun et al. 2020, Table 1: 24 blocks
    Architecture("ModernBERT-base", 22, 12, "later"),  # Warner et al. 2024, Table 4
    Architecture("Gemma 2 9B", 42, 16, "later"),  # Gemma Team 2024, Table 1
    Architecture("Qwen2.5 7B", 28, 28, "later"),  # Qwen Team 2024, Table 1
    Architecture("Llama 3.1 8B, Mistral 7B", 32, 32, "later"),  # Llama Team 2024, Table 3; Jiang et al. 2023, Table 1
    Architecture("gpt-oss-120b", 36, 64, "later"),  # OpenAI 2025, the model's configuration
    Architecture("Llama 3.1 70B, Qwen2.5 72B", 80, 64, "later"),  # their tables 3 and 1
    Architecture("Llama 3.1 405B", 126, 128, "later"),  # Llama Team 2024, Table 3
    Architecture("DeepSeek-V3", 61, 128, "later"),  # DeepSeek-AI 2024, §4.2
)


@dataclass(frozen=True)
class Config:
    groups: tuple[str, ...] = ("paper", "corrected", "later")
    seed: int = 0  # nothing is drawn


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per architecture and length: the share, by recursion and by exact integers.

    `mean` and `short` (the share of paths of at most half the depth) are the architecture's, from exact integers.
    """
    chosen = [each for each in ARCHITECTURES if each.group in config.groups]
    frames, work = [], Work(len(chosen), progress)
    for one in chosen:
        counts = path_counts(one.layers, one.heads)
        lengths, total = range(one.layers + 1), sum(counts)
        columns = {
            "architecture": one.name,
            "group": one.group,
            "layers": one.layers,
            "heads": one.heads,
            "length": lengths,
            "share": path_length_shares(one.layers, one.heads).tolist(),
            "exact": [float(Fraction(count, total)) for count in counts],
            "mean": float(Fraction(sum(k * count for k, count in zip(lengths, counts, strict=True)), total)),
            "short": float(Fraction(sum(counts[: one.layers // 2 + 1]), total)),
        }
        frames.append(pd.DataFrame(columns))
        work()
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    """Left: the paper's figure, its logarithmic axis too. Right: later models, or the same on a plain axis."""
    figure, axes = drawing.panels(2, width=4.2, height=5.0)
    later = rows(frame, group="later")
    shown = (frame[frame["group"] != "later"], later if len(later) else frame)
    titles = ("The paper's architectures", "Later ones" if len(later) else "The same, plain axis")
    for ax, own, title in zip(axes, shown, titles, strict=True):
        styles = [(colour, dashes) for dashes in ("-", ":") for colour in drawing.PALETTE]
        seen = own[own["exact"] > RARE].groupby("architecture", sort=False)
        for (name, found), (colour, dashes) in zip(seen, styles, strict=False):
            words = f"{name}, L {found['layers'].iloc[0]}, H {found['heads'].iloc[0]}"
            style = {"linestyle": dashes, "marker": "o", "markersize": 2.5, "linewidth": 1.2}
            line(ax, found.set_index("length")["exact"], colour, words, **style)
        axis(ax, title, "length", "share of all paths")
        drawing.legend_below(ax, columns=1)
    axes[0].set_xscale("log")
    axes[0].set_xticks([1, 2, 3, 4, 6, 12, 24, 32, 96], ["1", "2", "3", "4", "6", "12", "24", "32", "96"])
    axes[0].minorticks_off()
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    one = frame.groupby("architecture", sort=False).first()
    expected = one["layers"] * one["heads"] / (one["heads"] + 1)
    error = float(((frame["share"] - frame["exact"]) / frame["exact"]).abs().max())
    many, drawn, published = one[one["heads"] >= 8], one.loc[MOBILEBERT], one.loc[PUBLISHED_MOBILEBERT]
    return [
        judge(
            "the share of each length is Binomial(L, H/(H + 1)), whose mean is LH/(H + 1)",
            "Fig. 5: C(L, k)H^k paths of length k",
            f"{len(frame)} shares by recursion in float64 against exact integers: largest relative difference "
            f"{error:.0e}; mean {one['mean'][BERT]:.2f} of 12 (BERT-base), {one['mean'][GPT]:.2f} of 96 (GPT-3)",
            f"{ROUNDING:g}, relative: also where a share is {frame['exact'].min():.0e}",
            error < ROUNDING and ((one["mean"] - expected).abs() < ROUNDING * expected).all(),
            kind="check",
        ),
        judge(
            f"where there are 8 heads or more, fewer than {RARE:g} of all paths are of at most half the depth",
            "not in the paper; ours",
            f"at most {many['short'].max():.1e} ({many['short'].idxmax()}); above it: "
            + (", ".join(many.index[many["short"] >= RARE]) or "none"),
            f"below {RARE:g}",
            many["short"].max() < RARE,
            "a statement about numbers of paths, not about what they carry: see dong2021-paths",
        ),
        judge(
            "the MobileBERT of Fig. 5 is the published one",
            f"Fig. 5: L = {drawn['layers']:.0f}, H = {drawn['heads']:.0f}",
            f"the published model has L = {published['layers']:.0f}, H = {published['heads']:.0f}: "
            f"mean length {published['mean']:.1f}, not {drawn['mean']:.1f}",
            "the same number of layers",
            drawn["layers"] == published["layers"],
        ),
    ]


STUDY = Study("dong2021-lengths", Config(), Config(groups=("paper", "corrected")), compute, draw, claims)
