"""Do skips save deep models? Dong et al. 2021 say that they do, Yu & Zhang 2024 that they do not: both measures.

Dong et al. measure y = ‖X − 1x̄ᵀ‖_{1,∞}/‖X‖_{1,∞} over 12 layers, Yu & Zhang t_div = ‖X − 1x̄ᵀ‖_F²/‖X‖_F² over 100.
In the Frobenius norm the first is the root of the second, r² = t_div, and for any n × d matrix the two norms are within
(nd    kind="check",
(nd)^(1/4) of each other (`bounds_of_residual`), so that y and √t_div go to 0 together. What differs is the power, and
the depth.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.drawing import BLACK, BLUE, GREEN, ORANGE, VERMILION, panels, shared_legend
from depthscope.measures import EQUAL, composite_residual, token_diversity
from depthscope.models.families import build_family
from depthscope.progress import Share
from depthscope.text import read_text
from depthscope_lab.papers.dong2021.residuals import behind_blocks, left_out
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import ids_of
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, rows, table

COLOURS = {"SAN": VERMILION, "SAN+MLP": ORANGE, "SAN+skip": BLUE, "full": GREEN}
PAPER_DEPTH = 12  # of Dong et al.
GONE = 1e-6
SHOWN = 1e-10  # what the figure shows
LEVEL = 1 - EQUAL  # of t_div, where tokens count as equal


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 100  # with skips, in float32; without them 12 blocks in float64 suffice
    width: int = 768
    tokens: int = 128
    samples: int = 4


def bounds_of_residual(tokens: int, width: int) -> tuple[float, float]:
    """The least and the largest y/√t_div that an n × d matrix can have: 1/√(nd) and √(nd).

    ‖A‖_F/√d ≤ ‖A‖₁ ≤ √n‖A‖_F and ‖A‖_F/√n ≤ ‖A‖_∞ ≤ √d‖A‖_F, hence ‖A‖_F/(nd)^¼ ≤ ‖A‖_{1,∞} ≤ (nd)^¼‖A‖_F, for the
    residual and for X.
    """
    root = float(np.sqrt(tokens * width))
    return 1 / root, root


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: variant, block, sample, residual (y), diversity (t_div), frobenius (r)."""
    text = read_text(None)
    ids = ids_of(text, config.tokens, config.samples)["input_ids"]
    shallow = min(config.depth, PAPER_DEPTH)
    work = Work(2 * (config.depth + 1) + 2 * (shallow + 1), progress)
    of: dict[str, Any] = {
        "residual": composite_residual,
        "diversity": token_diversity,
        "frobenius": _frobenius_residual,
    }
    frames = []
    for depth, dtype, variants in (
        (shallow, torch.float64, ("SAN", "SAN+MLP")),
        (config.depth, torch.float32, ("SAN+skip", "full")),
    ):
        model: Any = build_family("bert", depth, config.width, seed=config.seed).to(dtype)
        for variant in variants:
            parts = left_out("bert", variant)
            found = behind_blocks(list(of.values()), model, ids, parts, len(ids), work)
            frames.append(
                table(dict(zip(of, found, strict=True)), block=range(depth + 1), sample=range(len(ids))).assign(
                    variant=variant
                )
            )
        del model  # 100 blocks of BERT are 2.8 GB
        gc.collect()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def _frobenius_residual(x: Tensor) -> Tensor:
    """r = ‖X − 1x̄ᵀ‖_F/‖X‖_F, straight from its definition."""
    y = x.double()
    shifted = y - y[..., :1, :]
    rest = shifted - shifted.mean(dim=-2, keepdim=True)
    return torch.linalg.matrix_norm(rest) / torch.linalg.matrix_norm(y)


def draw(frame: pd.DataFrame) -> Any:
    figure, (few, many) = panels(2, width=4.6, height=3.9)
    for variant, colour in COLOURS.items():
        shown = _means(frame, variant)
        wide = 4.0 if variant == "SAN" else 1.8  # the two without skips nearly coincide
        for ax in (few, many):
            line(ax, shown["residual"], colour, f"{variant}: residual y", linewidth=wide)
            line(ax, shown["diversity"], colour, f"{variant}: t_div", linestyle=":")
    many.axhline(LEVEL, color=BLACK, linewidth=0.8, linestyle="--", label="t_div = 0.01 (t_sim = 0.99)")
    depth, y = int(frame["block"].max()), "what is left beside the mean"
    axis(few, "12 blocks, as in Dong et al.", "block", y, ylim=(0, 0.75), first=0, last=PAPER_DEPTH)
    axis(many, f"{depth} blocks, as in Yu & Zhang", "block", y, log=True, ylim=(SHOWN, 2), first=0, last=depth)
    shared_legend(figure, many, columns=3)
    return figure


def _means(frame: pd.DataFrame, variant: str) -> pd.DataFrame:
    """Of y and t_div over samples, by block."""
    return rows(frame, variant=variant).groupby("block")[["residual", "diversity"]].mean()


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    unequal = frame[frame["diversity"] > 0]
    apart = float((unequal["frobenius"] ** 2 / unequal["diversity"] - 1).abs().max())
    ratio = unequal["residual"] / np.sqrt(unequal["diversity"])
    low, high = bounds_of_residual(config.tokens, config.width)
    means = {variant: _means(frame, variant) for variant in COLOURS}
    at = min(PAPER_DEPTH, config.depth)
    skipping = {v: means[v].loc[at] for v in ("SAN+skip", "full")}
    without = {v: means[v]["residual"].loc[at] for v in ("SAN", "SAN+MLP")}
    whole, skips = means["full"], means["SAN+skip"]
    end, deep = whole.loc[config.depth], config.depth >= 60
    return [
        judge(
            "in the Frobenius norm the relative residual is the root of t_div: r² = t_div",
            paper="neither paper says it; ours, by definition of both",
            ours=f"largest relative difference {apart:.1e} over all blocks, down to t_div = "
            f"{unequal['diversity'].min():.1e}",
            tolerance="1e-4: five digits of t_div at any degree of collapse",
            holds=apart < 1e-4,
            kind="check",
        ),
        judge(
            "y and √t_div go to 0 together: their ratio is bounded, and near 1",
            paper="ours: 1/√(nd) ≤ y/√t_div ≤ √(nd) for any tokens",
            ours=f"{ratio.min():.2f} to {ratio.max():.2f} over all variants and blocks; the bounds are {low:.2g} and "
            f"{high:.3g}",
            tolerance="within the bounds, and within a factor of 2 of 1",
            holds=bool(ratio.between(low, high).all() and ratio.between(0.5, 2).all()),
        ),
        judge(
            f"by Dong et al.'s measure, skips prevent the collapse of {at} blocks",
            paper="“skip connections … stop the output from degeneration” (abstract); y .449 and .345 at layer 12 "
            "(Fig. 2)",
            ours=", ".join(f"{v} y {row['residual']:.3f} (t_div {row['diversity']:.3f})" for v, row in skipping.items())
            + "; without skips "
            + ", ".join(f"{v} {value:.1e}" for v, value in without.items()),
            tolerance=f"more than 0.05 with skips, less than {GONE:g} without",
            holds=all(row["residual"] > 0.05 for row in skipping.values()) and max(without.values()) < GONE,
        ),
        judge(
            f"by both measures, {config.depth} blocks of the whole model collapse, skips and all",
            paper="Yu & Zhang 2024, Fig. 1: t_sim goes to 1 in BERT with 100 layers",
            ours=f"at block {config.depth} y is {end['residual']:.4f}, t_div {end['diversity']:.1e} (t_sim "
            f"{1 - end['diversity']:.4f}); SAN+skip: y {skips['residual'].loc[config.depth]:.4f}",
            tolerance=f"t_sim above {EQUAL:g}, and y below its value at block 12 by a factor of 5",
            holds=bool(1 - end["diversity"] > EQUAL and end["residual"] < whole["residual"].loc[PAPER_DEPTH] / 5)
            if deep
            else None,
            note="" if deep else "needs 60 blocks",
        ),
        _kind(means, config),
    ]


def _kind(means: dict[str, pd.DataFrame], config: Config) -> Claim:
    """Skips change how the collapse goes: a factor per block in place of a power."""
    deep = config.depth >= 60
    parts, steady = [], True
    for variant in ("SAN+skip", "full"):
        logs = np.log(means[variant]["residual"].loc[config.depth // 4 :])
        middle = len(logs) // 2
        halves = [np.exp(np.polyfit(half.index, half, 1)[0]) for half in (logs[:middle], logs[middle:])]
        steady &= bool(0 < np.log(halves[1]) / np.log(halves[0]) < 2) if halves[0] < 1 else False
        parts.append(f"{variant} × {halves[0]:.4f} and × {halves[1]:.4f} per block in the two halves")
    san = means["SAN"]["residual"]
    power = np.log(san.loc[2]) / np.log(san.loc[1])
    return judge(
        "skips turn a doubly exponential collapse into an exponential one, and do not end the collapse",
        paper="ours, from both papers' statements",
        ours="; ".join(parts) + f"; without skips ln y grows × {power:.2f} from block 1 to 2",
        tolerance="with skips the rate, in logarithms, changes by less than a factor of 2; without, it doubles or more",
        holds=bool(steady and power > 2) if deep else None,
        note="" if deep else "needs 60 blocks",
    )


QUICK = Config(depth=12, width=64, tokens=24, samples=2)
STUDY = Study("skips-two-measures", Config(), QUICK, compute, draw, claims)
