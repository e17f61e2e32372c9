"""Dovonon et al. 2025, Fig. 2: the three definitions of smoothing over depth, for models of vision and language.

Input convergence by ‖HFC‖/‖LFC‖ = √(t_div/t_sim), angle convergence by the mean cosine of two tokens, rank collapse by
the effective rank exp(−Σp log p), p = σ/Σσ. Each definition is weaker than the one before it: σ₁² ≥ ‖LFC‖², so that the
stable rank ‖X‖²/σ₁² is at most 1 + (‖HFC‖/‖LFC‖)². Base shapes with fresh weights, MiniLM as a real pretrained model,
and with `--data FOLDER` any model that a user has. No numbers of the paper's figure are known to us.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from depthscope.drawing import GREY, PALETTE, panels, shared_legend, similarity_axis
from depthscope.probing import probe
from depthscope.progress import Share
from depthscope.text import read_text
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import FRESH, Subject, fresh, given, ids_of, loaded, minilm, photographs
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line

TITLES = {
    "frequency_ratio": "Input convergence: ‖HFC‖/‖LFC‖ → 0",
    "cosine_similarity": "Angle convergence: mean cosine → 1",
    "effective_rank": "Rank collapse: effective rank → 1",
}


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 12
    width: int = 768
    tokens: int = 128
    samples: int = 4
    data: str | None = None  # a folder with pretrained models


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: model, weights, field, block, sample, and a column per measure."""
    text = read_text(None)
    words, pictures = ids_of(text, config.tokens, config.samples), photographs(config.samples)
    pretrained = [*minilm(), *given(config.data, None)]
    frames, work = [], Work(len(FRESH) + len(pretrained), progress)
    for family in FRESH:
        batch = pictures if family == "vit" else words
        frames.append(measured(fresh(family, config.depth, config.width, config.seed, batch)))
        work()
    for one in pretrained:
        frames.append(measured(loaded(one, text, config.tokens, config.samples)))
        work()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def measured(subject: Subject) -> pd.DataFrame:
    """What enters block 1 (block 0) and what leaves every block."""
    frame = probe(subject.model, subject.batch, measures=(*TITLES, "stable_rank"), stations="output").frame
    frame = frame[frame["station"] == "output"]  # without the norm after the last block
    wide = frame.pivot(index=["block", "sample"], columns="measure", values="value").reset_index()
    wide.columns.name = None
    return wide.assign(model=subject.name, weights=subject.weights, field=subject.field)


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(3, width=4.0, height=3.5)
    models = list(frame.groupby(["model", "weights"], sort=False))
    for ax, (measure, title) in zip(axes, TITLES.items(), strict=True):
        for ((model, weights), own), colour in zip(models, 2 * PALETTE, strict=False):
            style = {"linestyle": "--", "linewidth": 2.2} if weights == "pretrained" else {}
            line(ax, curve(own, measure), colour, f"{model}, {weights}", marker=".", **style)
        axis(ax, title, "block", measure.replace("_", " "), first=0, last=int(frame["block"].max()))
        ax.set_ylim(0, None)
    axes[0].axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    similarity_axis(axes[1], frame["cosine_similarity"].min())
    shared_legend(figure, axes[0], columns=5)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    means = frame.groupby(["model", "weights", "block"], sort=False)[list(TITLES)].mean()
    models = means.groupby(["model", "weights"], sort=False)
    ends = models.first().join(models.last().add_suffix("_end"))
    smooths = ends["frequency_ratio_end"] < ends["frequency_ratio"]
    pretrained = ends[ends.index.get_level_values("weights") == "pretrained"]
    filled = frame["stable_rank"] / (1 + frame["frequency_ratio"] ** 2)
    ranks = means.rank()
    angle = -ranks["frequency_ratio"].corr(ranks["cosine_similarity"])
    rank = ranks["frequency_ratio"].corr(ranks["effective_rank"])
    return [
        judge(
            "there are models in which tokens grow alike with depth",
            "“We find that there are cases where feature similarity increases” (abstract), Fig. 2",
            _say(ends[smooths]),
            "‖HFC‖/‖LFC‖ after the last block below what enters the first, in one model or more",
            smooths.any(),
        ),
        _blocks(means["frequency_ratio"]),
        judge(
            "smoothing is not inevitable in pretrained models: the tokens of one or more do not point one way at the "
            "end",
            "“this is not inevitable, even for existing pre-trained models” (abstract)",
            _say(pretrained) if len(pretrained) else "needs weights: MiniLM's package, or --data FOLDER; 0 models",
            "mean cosine below .9 after the last block",
            (pretrained["cosine_similarity_end"] < 0.9).any(),
            when=len(pretrained) > 0,
        ),
        judge(
            "input convergence implies rank collapse: the stable rank is at most 1 + (‖HFC‖/‖LFC‖)²",
            "Fig. 1: each definition is more relaxed than the one before; the inequality is ours",
            f"stable rank over its bound: {filled.min():.3f} to {filled.max():.3f}",
            "at most 1, and 1e-4 for rounding",
            filled.max() < 1 + 1e-4,
            kind="check",
        ),
        judge(
            "the three definitions put models and blocks into nearly the same order",
            "Fig. 2 shows all three side by side",
            f"rank correlation of ‖HFC‖/‖LFC‖ with 1 − cosine {angle:.2f}, with the effective rank {rank:.2f}",
            "0.8",
            angle > 0.8 and rank > 0.8,
        ),
    ]


def _say(ends: pd.DataFrame) -> str:
    """What enters a model, and what leaves it."""
    spelled = [
        f"{row.model} ({row.weights}) {row.frequency_ratio:.2f} → {row.frequency_ratio_end:.2f}, "
        f"cosine {row.cosine_similarity:.2f} → {row.cosine_similarity_end:.2f}, "
        f"rank {row.effective_rank:.0f} → {row.effective_rank_end:.0f}"
        for row in ends.reset_index().itertuples()
    ]
    return "; ".join(spelled) or "0 models"


def _blocks(ratio: pd.Series) -> Claim:
    """A block sharpens if ‖HFC‖/‖LFC‖, mean over samples, is larger after it than before it."""
    steps = ratio.groupby(["model", "weights"], sort=False).diff().dropna()
    counts = (steps > 0).groupby(["model", "weights"], sort=False).agg(["sum", "count"])
    both = counts.groupby("weights").sum()
    share = both["sum"] / both["count"]
    return judge(
        "single blocks of a pretrained model push tokens apart, more often than fresh blocks do",
        "ours; the paper's spectra of trained H (Fig. 5) say that trained blocks can",
        ", ".join("{} ({}) {} of {}".format(*row) for row in counts.reset_index().itertuples(index=False, name=None)),
        "a larger share of the blocks than in fresh models",
        share["pretrained"] > share["fresh"] if "pretrained" in share else None,
    )


STUDY = Study("dovonon2025-fig2", Config(), Config(depth=4, width=64, tokens=24, samples=2), compute, draw, claims)
