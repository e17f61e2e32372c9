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

MEASURES = ("frequency_ratio", "cosine_similarity", "effective_rank", "stable_rank", "token_similarity")
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
    found = [*minilm(), *given(config.data, None)]
    work = len(FRESH) + len(found)
    frames, advance = [], Work(work, progress)
    for family in FRESH:
        batch = pictures if family == "vit" else words
        frames.append(measured(fresh(family, config.depth, config.width, config.seed, batch)))
        advance()
    for one in found:
        frames.append(measured(loaded(one, text, config.tokens, config.samples)))
        advance()
    return pd.concat(frames, ignore_index=True).assign(text_sha256=text.sha256)


def measured(subject: Subject) -> pd.DataFrame:
    """What enters block 1 (block 0) and what leaves every block."""
    frame = probe(subject.model, subject.batch, measures=MEASURES).frame
    frame = frame[frame["station"] == "output"]
    wide = frame.pivot(index=["block", "sample"], columns="measure", values="value").reset_index()
    wide.columns.name = None
    return wide.assign(model=subject.name, weights=subject.weights, field=subject.field)


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = panels(3, width=4.0, height=3.5)
    models = frame.drop_duplicates(["model", "weights"])[["model", "weights"]]
    for ax, (measure, title) in zip(axes, TITLES.items(), strict=True):
        for number, (model, weights) in enumerate(models.itertuples(index=False)):
            style = {"linestyle": "--", "linewidth": 2.2} if weights == "pretrained" else {}
            own = curve(frame, measure, model=model, weights=weights)
            line(ax, own, PALETTE[number % len(PALETTE)], f"{model}, {weights}", marker=".", **style)
        axis(ax, title, "block", measure.replace("_", " "), first=0, last=int(frame["block"].max()))
    ratio, cosine, rank = axes
    ratio.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    ratio.set_ylim(0, None)
    similarity_axis(cosine, frame["cosine_similarity"].min())
    rank.set_ylim(0, None)
    shared_legend(figure, ratio, columns=5)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    ends = _ends(frame)
    smooths, keeps = ends["ratio_end"] < ends["ratio_start"], ends["ratio_end"] >= ends["ratio_start"]
    given = ends[ends["weights"] == "pretrained"]
    squares = 1 + frame["frequency_ratio"] ** 2
    apart = (frame["token_similarity"] * squares - 1).abs().max()
    room = frame["stable_rank"] / squares
    ranks = frame.groupby(["model", "weights", "block"])[list(TITLES)].mean().rank()
    angle = -ranks["frequency_ratio"].corr(ranks["cosine_similarity"])
    rank = ranks["frequency_ratio"].corr(ranks["effective_rank"])
    return [
        judge(
            "there are models in which tokens grow alike with depth",
            "“We find that there are cases where feature similarity increases” (abstract), Fig. 2",
            _say(ends[smooths]),
            "‖HFC‖/‖LFC‖ behind the last block below what enters the first, in one model or more",
            smooths.any(),
        ),
        judge(
            "there are models in which tokens do not grow alike with depth",
            "“contrary to prior results, this is not inevitable” (abstract), Fig. 2",
            _say(ends[keeps]),
            "‖HFC‖/‖LFC‖ behind the last block not below what enters the first, in one model or more",
            True if keeps.any() else None,  # five models do not refute it
            "" if keeps.any() else "the paper's pretrained models are not at hand",
        ),
        _blocks(frame),
        judge(
            "smoothing is not inevitable in pretrained models: the tokens of one or more do not point one way at the "
            "end",
            "“this is not inevitable, even for existing pre-trained models” (abstract)",
            _say(given) if len(given) else "needs weights: MiniLM's package, or --data FOLDER; 0 models",
            "mean cosine below .9 behind the last block",
            (given["cosine_end"] < 0.9).any(),
            when=len(given) > 0,
        ),
        judge(
            "input convergence is Yu & Zhang's token similarity: t_sim = 1/(1 + (‖HFC‖/‖LFC‖)²)",
            "neither paper says it; ours, by definition of both",
            f"largest relative difference {apart:.0e} over {len(frame)} token matrices",
            "1e-4: five digits of what float32 tokens give",
            apart < 1e-4,
            kind="check",
        ),
        judge(
            "input convergence implies rank collapse: the stable rank is at most 1 + (‖HFC‖/‖LFC‖)²",
            "Fig. 1: each definition is more relaxed than the one before; the inequality is ours",
            f"stable rank over its bound: {room.min():.3f} to {room.max():.3f}",
            "at most 1, and 1e-4 for rounding",
            room.max() < 1 + 1e-4,
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


def _ends(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model: what enters, what leaves."""
    means = frame.groupby(["model", "weights", "field", "block"], sort=False)[list(TITLES)].mean()
    short = ["ratio", "cosine", "rank"]
    models = means.groupby(["model", "weights", "field"], sort=False)
    first, last = (end.droplevel("block").set_axis(short, axis=1) for end in (models.head(1), models.tail(1)))
    return first.add_suffix("_start").join(last.add_suffix("_end")).reset_index()


def _say(ends: pd.DataFrame) -> str:
    told = [
        f"{row.model} ({row.weights}) {row.ratio_start:.2f} → {row.ratio_end:.2f}, cosine {row.cosine_start:.2f} → "
        f"{row.cosine_end:.2f}, rank {row.rank_start:.0f} → {row.rank_end:.0f}"
        for row in ends.itertuples()
    ]
    return "; ".join(told) or "0 models"


def _blocks(frame: pd.DataFrame) -> Claim:
    """A block sharpens if ‖HFC‖/‖LFC‖, mean over samples, is larger behind it than before it."""
    ratio = frame.groupby(["model", "weights", "block"], sort=False)["frequency_ratio"].mean()
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
