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

from depthscope.drawing import GREY, PALETTE, block_axis, label, panels, shared_legend, similarity_axis
from depthscope.probing import probe
from depthscope.progress import Share
from depthscope.text import read_text
from depthscope_lab.papers.dovonon2025.subjects import FRESH, Subject, fresh, ids_of, loaded, photographs, pretrained
from depthscope_lab.papers.study import Claim, Study, judge

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
    found = pretrained(config.data)
    frames, work = [], len(FRESH) + len(found)
    for family in FRESH:
        batch = pictures if family == "vit" else words
        frames.append(measured(fresh(family, config.depth, config.width, config.seed, batch)))
        progress(len(frames) / work)
    for one in found:
        frames.append(measured(loaded(one, text, config.tokens, config.samples)))
        progress(len(frames) / work)
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
    models = frame.drop_duplicates(["model", "weights"])
    for ax, (measure, title) in zip(axes, TITLES.items(), strict=True):
        for number, (model, weights) in enumerate(zip(models["model"], models["weights"], strict=True)):
            rows = frame[(frame["model"] == model) & (frame["weights"] == weights)]
            curve = rows.groupby("block")[measure].mean()
            style = {"linestyle": "--", "linewidth": 2.2} if weights == "pretrained" else {"linewidth": 1.6}
            colour = PALETTE[number % len(PALETTE)]
            ax.plot(curve.index, curve, marker=".", color=colour, label=f"{model}, {weights}", **style)
        block_axis(ax, int(frame["block"].max()), first=0)
        label(ax, title, "block", measure.replace("_", " "))
    ratio, cosine, rank = axes
    ratio.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    ratio.set_ylim(0, None)
    similarity_axis(cosine, frame["cosine_similarity"].min())
    rank.set_ylim(0, None)
    shared_legend(figure, ratio, columns=5)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    ends = _ends(frame)
    smoothing = ends[ends["ratio_end"] < ends["ratio_start"]]
    others = ends[ends["ratio_end"] >= ends["ratio_start"]]
    return [
        judge(
            "there are models in which tokens grow alike with depth",
            paper="“We find that there are cases where feature similarity increases” (abstract), Fig. 2",
            ours=_say(smoothing),
            tolerance="‖HFC‖/‖LFC‖ behind the last block below what enters the first, in one model or more",
            holds=len(smoothing) > 0,
        ),
        judge(
            "there are models in which tokens do not grow alike with depth",
            paper="“contrary to prior results, this is not inevitable” (abstract), Fig. 2",
            ours=_say(others),
            tolerance="‖HFC‖/‖LFC‖ behind the last block not below what enters the first, in one model or more",
            holds=len(others) > 0,
            note="" if len(others) else "five models do not refute it: the paper's pretrained ones are not at hand",
        ),
        _blocks(frame),
        _pretrained(ends),
        _same_as_similarity(frame),
        _implied(frame),
        _together(frame),
    ]


def _ends(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per model: what enters, what leaves."""
    rows = []
    for (model, weights, field), own in frame.groupby(["model", "weights", "field"], sort=False):
        curve = own.groupby("block")[list(TITLES)].mean()
        first, last = curve.iloc[0], curve.iloc[-1]
        rows.append((model, weights, field, *(end[name] for name in TITLES for end in (first, last))))
    names = [f"{name}_{end}" for name in ("ratio", "cosine", "rank") for end in ("start", "end")]
    return pd.DataFrame(rows, columns=["model", "weights", "field", *names])


def _say(ends: pd.DataFrame) -> str:
    told = [
        f"{row.model} ({row.weights}) {row.ratio_start:.2f} → {row.ratio_end:.2f}, cosine {row.cosine_start:.2f} → "
        f"{row.cosine_end:.2f}, rank {row.rank_start:.0f} → {row.rank_end:.0f}"
        for row in ends.itertuples()
    ]
    return "; ".join(told) or "0 models"


def _blocks(frame: pd.DataFrame) -> Claim:
    """A block sharpens if ‖HFC‖/‖LFC‖, mean over samples, is larger behind it than before it."""
    rows = frame.groupby(["model", "weights", "block"], sort=False)["frequency_ratio"].mean()
    steps = rows.groupby(["model", "weights"], sort=False).diff().dropna()
    counts = {name: (int((own > 0).sum()), len(own)) for name, own in steps.groupby(["model", "weights"], sort=False)}
    shares = [
        sum(more for (_, kind), (more, _) in counts.items() if kind == weights)
        / max(1, sum(count for (_, kind), (_, count) in counts.items() if kind == weights))
        for weights in ("fresh", "pretrained")
    ]
    return judge(
        "single blocks of a pretrained model push tokens apart, more often than fresh blocks do",
        paper="ours; the paper's spectra of trained H (Fig. 5) say that trained blocks can",
        ours=", ".join(f"{model} ({weights}) {more} of {count}" for (model, weights), (more, count) in counts.items()),
        tolerance="a larger share of the blocks than in fresh models",
        holds=shares[1] > shares[0] if (frame["weights"] == "pretrained").any() else None,
    )


def _pretrained(ends: pd.DataFrame) -> Claim:
    rows = ends[ends["weights"] == "pretrained"]
    kept = rows[rows["cosine_end"] < 0.9]
    return judge(
        "smoothing is not inevitable in pretrained models: the tokens of one or more do not point one way at the end",
        paper="“this is not inevitable, even for existing pre-trained models” (abstract)",
        ours=_say(rows) if len(rows) else "needs weights: MiniLM's package, or --data FOLDER; 0 models",
        tolerance="mean cosine below .9 behind the last block",
        holds=len(kept) > 0 if len(rows) else None,
    )


def _same_as_similarity(frame: pd.DataFrame) -> Claim:
    apart = (frame["token_similarity"] * (1 + frame["frequency_ratio"] ** 2) - 1).abs().max()
    return judge(
        "input convergence is Yu & Zhang's token similarity: t_sim = 1/(1 + (‖HFC‖/‖LFC‖)²)",
        paper="neither paper says it; ours, by definition of both",
        ours=f"largest relative difference {apart:.0e} over {len(frame)} token matrices",
        tolerance="1e-4: five digits of what float32 tokens give",
        holds=bool(apart < 1e-4),
    )


def _implied(frame: pd.DataFrame) -> Claim:
    room = frame["stable_rank"] / (1 + frame["frequency_ratio"] ** 2)
    return judge(
        "input convergence implies rank collapse: the stable rank is at most 1 + (‖HFC‖/‖LFC‖)²",
        paper="Fig. 1: each definition is more relaxed than the one before; the inequality is ours",
        ours=f"stable rank over its bound: {room.min():.3f} to {room.max():.3f}",
        tolerance="at most 1, and 1e-4 for rounding",
        holds=bool(room.max() < 1 + 1e-4),
    )


def _together(frame: pd.DataFrame) -> Claim:
    """Over all blocks of all models: how well the three orders agree."""
    means = frame.groupby(["model", "weights", "block"])[list(TITLES)].mean()
    ranks = means.rank()
    angle = -float(ranks["frequency_ratio"].corr(ranks["cosine_similarity"]))
    rank = float(ranks["frequency_ratio"].corr(ranks["effective_rank"]))
    return judge(
        "the three definitions put models and blocks into nearly the same order",
        paper="Fig. 2 shows all three side by side",
        ours=f"rank correlation of ‖HFC‖/‖LFC‖ with 1 − cosine {angle:.2f}, with the effective rank {rank:.2f}",
        tolerance="0.8",
        holds=bool(angle > 0.8 and rank > 0.8),
    )


STUDY = Study(
    "dovonon2025-fig2",
    full=Config(),
    quick=Config(depth=4, width=64, tokens=24, samples=2),
    compute=compute,
    draw=draw,
    claims=claims,
)
