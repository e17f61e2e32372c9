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
RARE = 1e-3
VISIBLE = 1e-3  # smaller shares are not drawn
BERT, GPT = "BERT-base, ViT-B", "GPT-3"
MOBILEBERT, PUBLISHED_MOBILEBERT = "MobileBERT", "MobileBERT as published"
_LOOKS = [(colour, dashes) for dashes in ("-", ":") for colour in drawing.PALETTE]


class Architecture(NamedTuple):
    """L layers with H attention heads each (query heads, where keys and values are shared)."""

    name: str
    layers: int
    heads: int
    source: str
    group: str = "paper"  # or "later", or "corrected"


ARCHITECTURES = (
    Architecture("DistilBERT", 6, 12, "Fig. 5"),
    Architecture("DeiT-T", 12, 3, "Fig. 5"),
    Architecture(MOBILEBERT, 12, 4, "Fig. 5"),
    Architecture(BERT, 12, 12, "Fig. 5"),
    Architecture("BERT-large, ViT-L", 24, 16, "Fig. 5"),
    Architecture("ViT-H", 32, 16, "Fig. 5"),
    Architecture("T5-3B", 24, 32, "Fig. 5, encoder"),
    Architecture("T5-11B", 24, 128, "Fig. 5, encoder"),
    Architecture(GPT, 96, 96, "Fig. 5"),
    Architecture(PUBLISHED_MOBILEBERT, 24, 4, "Sun et al. 2020, Table 1: 24 blocks", "corrected"),
    Architecture("ModernBERT-base", 22, 12, "Warner et al. 2024, Table 4", "later"),
    Architecture("Gemma 2 9B", 42, 16, "Gemma Team 2024, Table 1", "later"),
    Architecture("Qwen2.5 7B", 28, 28, "Qwen Team 2024, Table 1", "later"),
    Architecture("Llama 3.1 8B, Mistral 7B", 32, 32, "Llama Team 2024, Table 3; Jiang et al. 2023, Table 1", "later"),
    Architecture("gpt-oss-120b", 36, 64, "OpenAI 2025, the model's configuration", "later"),
    Architecture("Llama 3.1 70B, Qwen2.5 72B", 80, 64, "Llama Team 2024, Table 3; Qwen Team 2024, Table 1", "later"),
    Architecture("Llama 3.1 405B", 126, 128, "Llama Team 2024, Table 3", "later"),
    Architecture("DeepSeek-V3", 61, 128, "DeepSeek-AI 2024, §4.2", "later"),
)


@dataclass(frozen=True)
class Config:
    groups: tuple[str, ...] = ("paper", "corrected", "later")
    seed: int = 0  # nothing is drawn


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per architecture and length: the share, by recursion and by exact integers.

    `mean`, `mode` and `short` (the share of paths of at most half the
    depth) are those of the architecture, from exact integers.
    """
    chosen = [each for each in ARCHITECTURES if each.group in config.groups]
    frames, work = [], Work(len(chosen), progress)
    for name, layers, heads, _, group in chosen:
        counts = path_counts(layers, heads)
        lengths, total = range(layers + 1), sum(counts)
        columns = {
            "architecture": name,
            "group": group,
            "layers": layers,
            "heads": heads,
            "length": lengths,
            "share": path_length_shares(layers, heads).tolist(),
            "exact": [float(Fraction(count, total)) for count in counts],
            "mean": float(Fraction(sum(k * count for k, count in zip(lengths, counts, strict=True)), total)),
            "mode": max(zip(counts, lengths, strict=True))[1],  # of two equally frequent ones the longer
            "short": float(Fraction(sum(counts[: layers // 2 + 1]), total)),
        }
        frames.append(pd.DataFrame(columns))
        work()
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    """Left: the paper's figure, its logarithmic axis too. Right: later models."""
    figure, (paper, later) = drawing.panels(2, width=4.2, height=5.0)
    _draw_group(paper, frame[frame["group"] != "later"], "The paper's architectures")
    paper.set_xscale("log")
    paper.set_xticks([1, 2, 3, 4, 6, 12, 24, 32, 96], ["1", "2", "3", "4", "6", "12", "24", "32", "96"])
    paper.minorticks_off()
    rest = rows(frame, group="later")
    _draw_group(later, rest if len(rest) else frame, "Later ones" if len(rest) else "The same, plain axis")
    return figure


def _draw_group(ax: Any, frame: pd.DataFrame, title: str) -> None:
    """What is too rare to be seen is not drawn. What is corrected has the colour of what it corrects."""
    seen = frame[frame["exact"] > VISIBLE]
    names = [name for name in seen["architecture"].unique() if name != PUBLISHED_MOBILEBERT]
    looks = dict(zip(names, _LOOKS, strict=False))
    looks[PUBLISHED_MOBILEBERT] = (looks[MOBILEBERT][0], "--") if MOBILEBERT in looks else (drawing.GREEN, "--")
    for name, found in seen.groupby("architecture", sort=False):
        (colour, dashes), one = looks[name], found.iloc[0]
        told = f"{name}, L {one['layers']}, H {one['heads']}"
        look = {"linestyle": dashes, "marker": "o", "markersize": 2.5, "linewidth": 1.2}
        line(ax, found.set_index("length")["exact"], colour, told, **look)
    axis(ax, title, "length", "share of all paths")
    drawing.legend_below(ax, columns=1)


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    one = frame.groupby("architecture", sort=False).first()
    expected = one["layers"] * one["heads"] / (one["heads"] + 1)
    modes = ((one["layers"] + 1) * one["heads"]) // (one["heads"] + 1)
    error = float(((frame["share"] - frame["exact"]) / frame["exact"]).abs().max())
    bert, gpt, many = one.loc[BERT], one.loc[GPT], one[one["heads"] >= 8]
    found = [
        judge(
            "the share of each length is Binomial(L, H/(H + 1))",
            "Fig. 5: C(L, k)H^k paths of length k",
            f"{len(frame)} shares by recursion in float64 against exact integers: largest relative difference "
            f"{error:.0e}",
            f"{ROUNDING:g}, relative: also where a share is {frame['exact'].min():.0e}",
            error < ROUNDING,
            kind="check",
        ),
        judge(
            "the mean length is LH/(H + 1), and the most frequent one ⌊(L + 1)H/(H + 1)⌋",
            "follows from Fig. 5's law",
            f"mean {bert['mean']:.2f} of 12 (BERT-base), {gpt['mean']:.2f} of 96 (GPT-3); most "
            f"frequent {bert['mode']:.0f} and {gpt['mode']:.0f}",
            "mean to 1e-12, relative; the most frequent length exactly (of two the longer)",
            ((one["mean"] - expected).abs() < 1e-12 * expected).all() and (one["mode"] == modes).all(),
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
    ]
    if PUBLISHED_MOBILEBERT in one.index:
        drawn, published = one.loc[MOBILEBERT], one.loc[PUBLISHED_MOBILEBERT]
        found.append(
            judge(
                "the MobileBERT of Fig. 5 is the published one",
                f"Fig. 5: L = {drawn['layers']:.0f}, H = {drawn['heads']:.0f}",
                f"the published model has L = {published['layers']:.0f}, H = {published['heads']:.0f}: "
                f"mean length {published['mean']:.1f}, not {drawn['mean']:.1f}",
                "the same number of layers",
                drawn["layers"] == published["layers"],
            )
        )
    return found


STUDY = Study("dong2021-lengths", Config(), Config(groups=("paper", "corrected")), compute, draw, claims)
