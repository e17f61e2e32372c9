"""Dovonon et al. 2025, Fig. 5: the eigenvalues of H = W_V W_O, of fresh, of trained and of pretrained models.

The paper's caption: models of vision skew to the negatives, those of language are symmetric. Here: base shapes with
fresh weights; MiniLM where it is installed and any model that a user gives (`--data FOLDER`); and two small models
before and after training here, one of vision on digits, one of language on Python's manual, three seeds each. Real
parts are divided by the spectral radius of their block, so that blocks can be put into one histogram.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from depthscope.drawing import BLUE, GREY, VERMILION, legend_inside, panels
from depthscope.models.families import build_family
from depthscope.progress import Share, Steps
from depthscope.value_spectra.weights import WHOLE, spectra
from depthscope_lab.papers.claims import axis, curve, line, rows, said
from depthscope_lab.papers.dovonon2025.fig5_runs import Training, before_and_after
from depthscope_lab.papers.dovonon2025.subjects import FRESH, pretrained
from depthscope_lab.papers.study import Claim, Study

BINS = np.linspace(-1, 1, 41)
COLUMNS = 4  # of panels
COLOURS = {"fresh": GREY, "trained": VERMILION, "pretrained": BLUE}


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 3  # seeds of the models that are trained here
    depth: int = 12  # of the fresh base shapes
    width: int = 768
    training: Training = field(default_factory=Training)
    data: str | None = None  # a folder with pretrained models


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per model, state, seed, block and bin of Re μ by the block's radius, with the share of the eigenvalues.

    Of the block: negative_share, trace (tr H over √d‖H‖_F, the mimetic score), folded_share (of (I − 11ᵀ/d)diag(γ)H in
    pre-norm), growth (max|1 + μ|); of the model: score (accuracy, or loss over that of word counts).
    """
    found = pretrained(config.data)
    steps = config.training.steps
    shares = 2 * config.trials * steps + (len(FRESH) + len(found)) * steps
    advance, frames = Steps(lambda done: progress(min(1.0, done / shares))), []

    def add(model: Any, vision: bool, name: str, state: str, seed: int) -> None:
        about = {"model": name, "field": "vision" if vision else "language", "state": state, "seed": seed}
        frames.append(_blocks(model).assign(**about, score=np.nan))
        for _ in range(steps):
            advance()

    for family, name in FRESH.items():
        model = build_family(family, config.depth, config.width, seed=config.seed)
        add(model, family == "vit", name, "fresh", config.seed)
    for one in found:
        model = one.load()
        add(model, getattr(model, "main_input_name", "") == "pixel_values", one.name, "pretrained", 0)
    for trial in range(config.trials):
        frames.append(before_and_after(_blocks, config.training, config.seed + trial, advance))
    progress(1.0)
    return pd.concat(frames, ignore_index=True)


def _blocks(model: Any) -> pd.DataFrame:
    """A histogram of the real parts of every block's whole H, and what is said of it."""
    try:
        folded = rows(spectra(model, fold_norm=True).summary, head=WHOLE).set_index("block")["negative_share"]
    except ValueError:  # post-norm: no norm stands before attention
        folded = None
    frames, whole = [], spectra(model).frame
    for block, values in rows(whole, head=WHOLE).groupby("block"):
        first = values.iloc[0]
        counts, _ = np.histogram(values["real"] / first["spectral_radius"], BINS)
        about = {
            "block": block,
            "eigenvalues": len(values),
            "negative_share": first["negative_share"],
            "trace": first["mimetic_score"],
            "growth": first["mean_growth"],
            "folded_share": np.nan if folded is None else folded.loc[block],
        }
        frames.append(pd.DataFrame({"bin": (BINS[:-1] + BINS[1:]) / 2, "share": counts / len(values)}).assign(**about))
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    models = list(dict.fromkeys(frame["model"]))
    lines = 1 + (len(models) > COLUMNS) + (len(models) > 2 * COLUMNS) + (len(models) > 3 * COLUMNS)
    figure, axes = panels(COLUMNS, lines, width=3.2, height=2.8)
    for ax, model in zip(axes, models, strict=False):
        for state, colour in COLOURS.items():
            heights = curve(frame, "share", by="bin", model=model, state=state)
            if len(heights):
                line(ax, heights, colour, state, drawstyle="steps-mid")
        ax.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        axis(ax, model, "Re μ by the block's radius", "share of the eigenvalues")
        legend_inside(ax)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    blocks = frame.drop_duplicates(["model", "state", "seed", "block"])
    summed = ["negative_share", "trace", "folded_share", "score"]
    means = blocks.groupby(["model", "field", "state", "seed"])[summed].mean()
    lacks = "" if config.training.steps >= 300 else "needs 300 steps"
    fresh = rows(blocks, state="fresh")
    off = (fresh["negative_share"] - 0.5).abs()
    score = means.xs("trained", level="state")["score"].groupby("field").mean()
    return [
        said(
            "fresh weights are symmetric: half of the eigenvalues of H have a negative real part",
            "not in the caption; ours: −H has the law of H",
            ", ".join(f"{name} {share:.1%}" for name, share in curve(fresh, "negative_share", by="model").items())
            + f"; farthest block {off.max():.1%} from one half",
            "2/√d for every block: four deviations of a share of d independent signs",
            (off * np.sqrt(fresh["eigenvalues"])).max() < 2,
        ),
        said(
            "both models that are trained here have learned",
            "ours: spectra of a model that learned nothing say nothing",
            f"test accuracy {score['vision']:.1%}; test loss {score['language']:.2f} of that of word counts",
            "accuracy above 90 %, loss below .9 of word counts",
            score["vision"] > 0.9 and score["language"] < 0.9,
            lacks=lacks,
        ),
        *(_moved(means, kind, lacks) for kind in ("vision", "language")),
        *(_pretrained(rows(blocks, state="pretrained", field=kind), kind) for kind in ("vision", "language")),
    ]


def _moved(means: pd.DataFrame, kind: str, lacks: str) -> Claim:
    """Before and after, seed by seed."""
    own = means.xs(kind, level="field").reset_index()
    own = own[own["model"].str.startswith("small")].set_index(["state", "seed"])
    share, trace, folded = (own[name].unstack("state") for name in ("negative_share", "trace", "folded_share"))
    change, end = share["trained"] - share["fresh"], share["trained"].mean()
    claim, paper = "Python's manual leaves the eigenvalues of H symmetric (language)", "language is symmetric"
    tolerance, holds = "45 to 55 % in the mean", bool(0.45 <= end <= 0.55)
    if kind == "vision":
        claim, paper = (
            "digits moves the eigenvalues of H to the negative side (vision)",
            "vision skews to the negatives",
        )
        tolerance, holds = "above 55 % in the mean, and more in every seed", bool(end > 0.55 and (change > 0).all())
    return said(
        f"training on {claim}",
        f"Fig. 5, caption: {paper}",
        f"negative share {share['fresh'].mean():.1%} → {end:.1%} (seeds: "
        f"{', '.join(f'{value:+.1%}' for value in change)}); with LN "
        f"folded in {folded['fresh'].mean():.1%} → {folded['trained'].mean():.1%}; tr H/(√d‖H‖) "
        f"{trace['fresh'].mean():+.3f} → {trace['trained'].mean():+.3f}",
        tolerance,
        holds,
        lacks=lacks,
    )


def _pretrained(blocks: pd.DataFrame, kind: str) -> Claim:
    per = blocks.groupby("model", sort=False)["negative_share"].agg(["mean", "min", "max"])
    skewed = kind == "vision"
    told = (f"{model} {row['mean']:.1%} ({row['min']:.1%} to {row['max']:.1%})" for model, row in per.iterrows())
    return said(
        f"pretrained models of {kind} {'skew to the negatives' if skewed else 'have symmetric eigenvalues of H'}",
        "Fig. 5, caption",
        ", ".join(told) or "0 models at hand: --data FOLDER",
        "negative share above 55 % in every model" if skewed else "45 to 55 % in every model",
        (per["mean"] > 0.55).all() if skewed else per["mean"].between(0.45, 0.55).all(),
        when=not per.empty,
    )


TINY = Training(depth=2, width=32, heads=2, steps=6, tokens=16, pieces=80)
STUDY = Study("dovonon2025-fig5", Config(), Config(0, 2, 2, 64, TINY), compute, draw, claims)
