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

from depthscope.drawing import BLUE, GREY, VERMILION, label, panels
from depthscope.models.families import build_family
from depthscope.probing.weight_spectra import WHOLE, spectra
from depthscope.progress import Share
from depthscope_lab.papers.dovonon2025.fig5_runs import Training, before_and_after
from depthscope_lab.papers.dovonon2025.subjects import FRESH, pretrained
from depthscope_lab.papers.study import Claim, Study, judge

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
    steps = 2 * config.trials * config.training.steps
    work, done = steps + (len(FRESH) + len(found)) * config.training.steps, 0

    def advance(by: int = 1) -> None:
        nonlocal done
        done += by
        progress(min(1.0, done / work))

    frames = []
    for family, name in FRESH.items():
        model = build_family(family, config.depth, config.width, seed=config.seed)
        kind = "vision" if family == "vit" else "language"
        frames.append(_blocks(model).assign(model=name, field=kind, state="fresh", seed=config.seed, score=np.nan))
        advance(config.training.steps)
    for one in found:
        model = one.load()
        kind = "vision" if getattr(model, "main_input_name", "") == "pixel_values" else "language"
        frames.append(_blocks(model).assign(model=one.name, field=kind, state="pretrained", seed=0, score=np.nan))
        advance(config.training.steps)
    for trial in range(config.trials):
        frames.append(before_and_after(_blocks, config.training, config.seed + trial, advance))
    progress(1.0)
    return pd.concat(frames, ignore_index=True)


def _blocks(model: Any) -> pd.DataFrame:
    """A histogram of the real parts of every block's whole H, and what is said of it."""
    try:
        folded = spectra(model, fold_norm=True).summary
    except ValueError:  # post-norm: no norm stands before attention
        folded = None
    frames = []
    for block, rows in (whole := spectra(model).frame).loc[whole["head"] == WHOLE].groupby("block"):
        first = rows.iloc[0]
        counts, _ = np.histogram(rows["real"] / first["spectral_radius"], BINS)
        share = np.nan
        if folded is not None:
            share = folded[(folded["block"] == block) & (folded["head"] == WHOLE)]["negative_share"].iloc[0]
        frames.append(
            pd.DataFrame({"bin": (BINS[:-1] + BINS[1:]) / 2, "share": counts / len(rows)}).assign(
                block=block,
                eigenvalues=len(rows),
                negative_share=first["negative_share"],
                trace=first["mimetic_score"],
                growth=first["mean_growth"],
                folded_share=share,
            )
        )
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    models = list(dict.fromkeys(frame["model"]))
    rows = 1 + (len(models) > COLUMNS) + (len(models) > 2 * COLUMNS) + (len(models) > 3 * COLUMNS)
    figure, axes = panels(COLUMNS, rows, width=3.2, height=2.8)
    for ax, model in zip(axes, models, strict=False):
        own = frame[frame["model"] == model]
        for state, colour in COLOURS.items():
            chosen = own[own["state"] == state]
            if len(chosen):
                heights = chosen.groupby("bin")["share"].mean()
                ax.plot(heights.index, heights, drawstyle="steps-mid", color=colour, linewidth=1.6, label=state)
        ax.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        label(ax, model, "Re μ by the block's radius", "share of the eigenvalues")
        ax.legend(fontsize=8, frameon=False)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    blocks = frame.drop_duplicates(["model", "state", "seed", "block"])
    summed = ["negative_share", "trace", "folded_share", "score"]
    means = blocks.groupby(["model", "field", "state", "seed"])[summed].mean()
    enough = config.training.steps >= 300
    return [
        _fresh(blocks),
        _learned(means, config, enough),
        _moved(means, "vision", enough),
        _moved(means, "language", enough),
        _pretrained(blocks, "vision"),
        _pretrained(blocks, "language"),
    ]


def _fresh(blocks: pd.DataFrame) -> Claim:
    """A random H has half of its eigenvalues on either side, within the scatter of a block."""
    rows = blocks[blocks["state"] == "fresh"]
    off = (rows["negative_share"] - 0.5).abs()
    per = rows.groupby("model")["negative_share"].mean()
    most = float((off * np.sqrt(rows["eigenvalues"])).max())
    return judge(
        "fresh weights are symmetric: half of the eigenvalues of H have a negative real part",
        paper="not in the caption; ours: −H has the law of H",
        ours=", ".join(f"{model} {share:.1%}" for model, share in per.items())
        + f"; farthest block {off.max():.1%} from one half",
        tolerance="2/√d for every block: four deviations of a share of d independent signs",
        holds=most < 2,
    )


def _learned(means: pd.DataFrame, config: Config, enough: bool) -> Claim:
    trained = means.xs("trained", level="state")["score"].groupby("field").mean()
    return judge(
        "both models that are trained here have learned",
        paper="ours: spectra of a model that learned nothing say nothing",
        ours=f"test accuracy {trained['vision']:.1%}; test loss {trained['language']:.2f} of that of word counts",
        tolerance="accuracy above 90 %, loss below .9 of word counts",
        holds=bool(trained["vision"] > 0.9 and trained["language"] < 0.9) if enough else None,
        note="" if enough else "needs 300 steps",
    )


def _moved(means: pd.DataFrame, kind: str, enough: bool) -> Claim:
    """Before and after, seed by seed."""
    own = means.xs(kind, level="field").reset_index()
    own = own[own["model"].str.startswith("small")].set_index(["state", "seed"])
    share, trace, folded = (own[name].unstack("state") for name in ("negative_share", "trace", "folded_share"))
    change = share["trained"] - share["fresh"]
    vision = kind == "vision"
    told = ", ".join(f"{value:+.1%}" for value in change)
    return judge(
        "training on digits moves the eigenvalues of H to the negative side (vision)"
        if vision
        else "training on Python's manual leaves the eigenvalues of H symmetric (language)",
        paper="Fig. 5, caption: vision skews to the negatives" if vision else "Fig. 5, caption: language is symmetric",
        ours=f"negative share {share['fresh'].mean():.1%} → {share['trained'].mean():.1%} (seeds: {told}); with LN "
        f"folded in {folded['fresh'].mean():.1%} → {folded['trained'].mean():.1%}; tr H/(√d‖H‖) "
        f"{trace['fresh'].mean():+.3f} → {trace['trained'].mean():+.3f}",
        tolerance="above 55 % in the mean, and more in every seed" if vision else "45 to 55 % in the mean",
        holds=(
            bool(share["trained"].mean() > 0.55 and (change > 0).all())
            if vision
            else bool(0.45 <= share["trained"].mean() <= 0.55)
        )
        if enough
        else None,
        note="" if enough else "needs 300 steps",
    )


def _pretrained(blocks: pd.DataFrame, kind: str) -> Claim:
    rows = blocks[(blocks["state"] == "pretrained") & (blocks["field"] == kind)]
    per = rows.groupby("model", sort=False)["negative_share"].agg(["mean", "min", "max"])
    vision = kind == "vision"
    return judge(
        f"pretrained models of {kind} {'skew to the negatives' if vision else 'have symmetric eigenvalues of H'}",
        paper="Fig. 5, caption",
        ours=", ".join(
            f"{model} {row['mean']:.1%} ({row['min']:.1%} to {row['max']:.1%})" for model, row in per.iterrows()
        )
        or "0 models at hand: --data FOLDER",
        tolerance="negative share above 55 % in every model" if vision else "45 to 55 % in every model",
        holds=None
        if per.empty
        else bool((per["mean"] > 0.55).all())
        if vision
        else bool(per["mean"].between(0.45, 0.55).all()),
    )


STUDY = Study(
    "dovonon2025-fig5",
    full=Config(),
    quick=Config(
        trials=2, depth=2, width=64, training=Training(depth=2, width=32, heads=2, steps=6, tokens=16, pieces=80)
    ),
    compute=compute,
    draw=draw,
    claims=claims,
)
