"""Where the three papers meet: one model, one axis, each paper's measure and each paper's prediction over depth.

Dong et al. 2021 measure y = ‖X − 1x̄ᵀ‖/‖X‖ in a composite norm and say that skips stop the collapse. Yu & Zhang 2024
measure t_sim = 1/(1 + r²) and predict, for weights drawn anew in every block, that a block leaves the mean 1 + ‖H‖_F²/d
times its energy and the deviations theirs: r shrinks by 1/√(1 + ‖H‖_F²/d). Dovonon et al. 2025 measure
r = ‖HFC‖/‖LFC‖ and predict, for the same A and H in every block, the factor max|1 + λμ| over λ ≠ 1 by max|1 + μ|. BERT
has weights of its own in every block, ALBERT the same in all. The update X + AXH, block by block with each block's own
A and H, stands beside them.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from depthscope.anatomy import BlockAnatomy, anatomy_of
from depthscope.drawing import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILION, legend_inside, panels, shared_legend
from depthscope.hooks import Ablation, Listen, Machine, Visit, undisturbed
from depthscope.hooks.machine import ListenToAttention
from depthscope.measures import composite_residual, frequency_ratio, token_similarity
from depthscope.models.families import build_family
from depthscope.progress import Share
from depthscope.text import read_text
from depthscope.theory import dominance_of
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import ids_of
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, rows, table

ALONE = "albert, no FFN"
MODELS = {
    "bert": "BERT, own weights in every block",
    "albert": "ALBERT, the same weights in all",
    ALONE: "ALBERT without its FFN steps",
}
PREDICTIONS = {
    "dong": ("Dong et al.: skips keep it", GREY),
    "yu": ("Yu & Zhang: 1/√(1 + ‖H‖²/d) per block", BLUE),
    "dovonon": ("Dovonon et al.: dominating eigenvalues", VERMILION),
    "update": ("X + AXH with each block's A and H", GREEN),
}
MEASURED = {"ratio": "‖HFC‖/‖LFC‖", "residual": "residual y", "similarity": "t_sim"}
FIRST = 0.25  # of the blocks: rates are read after it


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 60
    width: int = 768
    tokens: int = 128
    samples: int = 2
    examined: int = 8  # blocks, spread over the depth, whose eigenvalues are computed


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: model, block, sample; measured ratio, residual, similarity; the predictions of the ratio."""
    text = read_text(None)
    batch = ids_of(text, config.tokens, config.samples)
    work, frames = Work(len(MODELS), progress), []
    for name in MODELS:
        family, *without = name.split(", ")
        model: Any = build_family(family, config.depth, config.width, seed=config.seed)
        frames.append(_of_model(model, batch, config, ("ffn_step",) if without else ()).assign(model=name))
        del model
        gc.collect()
        work()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def _of_model(model: Any, batch: dict[str, Tensor], config: Config, without: tuple[str, ...]) -> pd.DataFrame:
    anatomy = anatomy_of(model)
    tokens: list[Tensor] = []
    attention: list[Tensor] = []  # of each block, the mean over its heads
    blocks: list[BlockAnatomy] = []

    def see(visit: Visit, station: str, x: Tensor, _source: Tensor) -> None:
        if station == "output" or visit.number == 1:
            tokens.append(x.double())
        if station == "output":
            blocks.append(visit.block)

    def hear(_visit: Visit, _kind: str, heads: Any, _values: Tensor | None) -> None:
        attention.append(torch.stack([head.attention.dense().double() for head in heads]).mean(dim=0))

    cut_out = Ablation(model, anatomy, without) if without else nullcontext()
    listening = Machine(model, anatomy, Listen({"input", "output"}, see), ListenToAttention(hear))
    with undisturbed(model), cut_out, listening:
        model(**batch)
    assert len(attention) == len(blocks)
    return _rows(tokens, attention, blocks, config)


def _rows(tokens: list[Tensor], attention: list[Tensor], blocks: list[BlockAnatomy], config: Config) -> pd.DataFrame:
    """Yu & Zhang's factor is of each block, Dovonon et al.'s of the nearest one that was examined."""
    weights = [value_weights(block) for block in blocks]
    examined = sorted({round(place) for place in np.linspace(0, len(blocks) - 1, config.examined)})
    rates = {place: dominance_of(attention[place][0], weights[place]).rate for place in examined}
    start, x = frequency_ratio(tokens[0]), tokens[0]
    yu, dovonon = torch.ones_like(start), torch.ones_like(start)
    frames = []
    for block, now in enumerate(tokens):
        if block:
            h = weights[block - 1]
            x = x + attention[block - 1] @ x @ h
            x = x / torch.linalg.matrix_norm(x, keepdim=True)
            yu = yu * (1 + h.square().sum().item() / len(h)) ** -0.5
            dovonon = dovonon * rates[min(examined, key=lambda other: abs(other - block + 1))]
        columns = {
            "ratio": frequency_ratio(now),
            "residual": composite_residual(now),
            "similarity": token_similarity(now),
            "dong": start,
            "yu": start * yu,
            "dovonon": start * dovonon,
            "update": frequency_ratio(x),
        }
        frames.append(table(columns, sample=range(len(now))).assign(block=block))
    return pd.concat(frames, ignore_index=True)


def value_weights(block: BlockAnatomy) -> Tensor:
    """H = Σ_h W_V W_O of all heads, (d, d) in float64. Fresh heads attend alike, so that one A stands for all."""
    assert block.projections is not None
    projections = block.projections()
    assert projections.output is not None
    return (projections.value.detach().double() @ projections.output.detach().double()).sum(dim=0)


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(3, 2, width=4.2, height=3.4)
    last = int(frame["block"].max())
    for column, (family, title) in enumerate(MODELS.items()):
        mean = rows(frame, model=family).groupby("block")[[*MEASURED, *PREDICTIONS]].mean()
        above, below = axes[column], axes[column + 3]
        line(above, mean["ratio"], BLACK, "measured ‖HFC‖/‖LFC‖", linewidth=3, alpha=0.5)
        for name, (words, colour) in PREDICTIONS.items():
            line(above, mean[name], colour, words, linewidth=1.5, linestyle="--")
        for (name, words), colour in zip(MEASURED.items(), (BLACK, ORANGE, BLUE), strict=True):
            line(below, mean[name], colour, words, linewidth=2)
        axis(above, title, "block", "‖HFC‖/‖LFC‖", log=True, ylim=(1e-3, 3), first=0, last=last)
        axis(below, "the three papers' measures", "block", "", ylim=(0, 1.5), first=0, last=last)
        legend_inside(below)
    shared_legend(figure, axes[0], columns=3)
    return figure


# Whose rate should be right: model → what is claimed of it.
RATES = {
    "bert": "with own weights in every block (BERT), Yu & Zhang's rate is right and the dominating eigenvalues' is not",
    ALONE: "with the same weights in all blocks and no FFN, the dominating eigenvalues' rate is right, the other not",
}


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    lacks = "" if config.depth >= 40 else "needs 40 blocks"
    apart = (frame["similarity"] * (1 + frame["ratio"] ** 2) - 1).abs().max()
    shares = frame["residual"] / np.sqrt(1 - frame["similarity"])
    means = {family: rows(frame, model=family).groupby("block").mean(numeric_only=True) for family in MODELS}
    kept = {family: own["residual"].iloc[-1] / own["residual"].iloc[0] for family, own in means.items()}
    compared = ("ratio", "yu", "dovonon", "update")
    slopes = {family: {name: _slope(own[name], config) for name in compared} for family, own in means.items()}
    near = {family: {name: _near(rate, own["ratio"]) for name, rate in own.items()} for family, own in slopes.items()}
    right = {
        "bert": near["bert"]["yu"] and not near["bert"]["dovonon"],
        ALONE: near[ALONE]["dovonon"] and not near[ALONE]["yu"],
    }
    return [
        judge(
            "the three papers' measures are one: t_sim = 1/(1 + r²), and y is √t_div within a constant factor",
            "none of them says it; ours",
            f"largest relative difference {apart:.0e}; y/√t_div from {shares.min():.2f} to {shares.max():.2f}",
            "1e-9, and a factor of 2 of 1",
            apart < 1e-9 and shares.between(0.5, 2).all(),
            kind="check",
        ),
        judge(
            "skips delay the collapse without ending the collapse: Dong et al.'s own residual shrinks with depth",
            "Dong et al.: “skip connections … stop the output from degeneration”; Yu & Zhang: they do not",
            f"y after block {means['bert'].index[-1]} is "
            + ", ".join(f"{share:.1e} of its start in {family}" for family, share in kept.items()),
            "below a fifth",
            all(share < 0.2 for share in kept.values()),
            lacks=lacks,
        ),
        *(
            judge(
                words,
                "Yu & Zhang: independent weights; Dovonon et al.: one A and one H, repeated, no norm and no FFN",
                "‖HFC‖/‖LFC‖ × {ratio:.4f} per block; Yu & Zhang {yu:.4f}, Dovonon et al. {dovonon:.4f}".format(
                    **slopes[family]
                ),
                "20 % of the logarithm",
                right[family],
                lacks=lacks,
            )
            for family, words in RATES.items()
        ),
        judge(
            "Dovonon et al.'s update with each block's own A and H gives the measured rate, without norms and FFNs",
            "ours, from their eq. of the update",
            "; ".join(
                f"{family}: measured × {own['ratio']:.4f}, update × {own['update']:.4f}"
                for family, own in slopes.items()
            ),
            "20 % of the logarithm",
            all(own["update"] for own in near.values()),
            lacks=lacks,
        ),
    ]


def _slope(values: pd.Series, config: Config) -> float:
    """The factor per block, by least squares of the logarithm after the first quarter."""
    logs = np.log(values.loc[int(FIRST * config.depth) :])
    return float(np.exp(np.polyfit(logs.index, logs, 1)[0]))


def _near(rate: float, seen: float) -> bool:
    """Whether two factors per block agree, to a fifth of what the measured one does."""
    return bool(abs(np.log(rate) - np.log(seen)) < 0.2 * abs(np.log(seen)))


QUICK = Config(depth=6, width=64, tokens=24, examined=2)
STUDY = Study("three-papers", Config(), QUICK, compute, draw, claims)
