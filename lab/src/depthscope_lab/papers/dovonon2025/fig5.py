"""Dovonon et al. 2025, Fig. 5: the eigenvalues of H = W_V W_O, of fresh and of pretrained models.

The paper's caption: models of vision skew to the negatives, those of language are symmetric. Here: base shapes with
fresh weights; MiniLM where it is installed and any model that a user gives (`--data FOLDER`). Real parts are divided by
the spectral radius of their block, so that blocks can be put into one histogram.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from depthscope.drawing import BLUE, GREY, legend_inside, panels
from depthscope.models.families import build_family
from depthscope.progress import Share
from depthscope.value_spectra.weights import WHOLE, spectra
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.subjects import FRESH, given, minilm
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, line, rows

BINS = np.linspace(-1, 1, 41)
COLUMNS = 5  # of panels
COLOURS = {"fresh": GREY, "pretrained": BLUE}


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 12  # of the fresh base shapes
    width: int = 768
    data: str | None = None  # a folder with pretrained models


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """One row per model, state, block and bin of Re μ by the block's radius, with the share of the eigenvalues.

    `negative_share`, of the block: how many of its `eigenvalues` have a negative real part.
    """
    pretrained = [*minilm(), *given(config.data, None)]
    work, frames = Work(len(FRESH) + len(pretrained), progress), []

    def add(model: Any, name: str, state: str) -> None:
        kind = "vision" if model.main_input_name == "pixel_values" else "language"
        for block, values in rows(spectra(model).frame, head=WHOLE).groupby("block"):
            first = values.iloc[0]
            counts, _ = np.histogram(values["real"] / first["spectral_radius"], BINS)
            frame = pd.DataFrame({"bin": (BINS[:-1] + BINS[1:]) / 2, "share": counts / len(values)})
            known = {"negative_share": first["negative_share"], "eigenvalues": len(values)}
            frames.append(frame.assign(model=name, field=kind, state=state, block=block, **known))
        work()

    for family, name in FRESH.items():
        add(build_family(family, config.depth, config.width, seed=config.seed), name, "fresh")
    for one in pretrained:
        add(one.load(), one.name, "pretrained")
    return pd.concat(frames, ignore_index=True)


def draw(frame: pd.DataFrame) -> Any:
    models: Any = list(frame.groupby(["model", "state"], sort=False))
    figure, axes = panels(COLUMNS, 1 + (len(models) > COLUMNS) + (len(models) > 2 * COLUMNS), width=3.2, height=2.8)
    for ax, ((model, state), own) in zip(axes, models, strict=False):
        line(ax, curve(own, "share", by="bin"), COLOURS[str(state)], str(state), drawstyle="steps-mid")
        ax.axvline(0, color=GREY, linewidth=0.8, linestyle=":")
        axis(ax, model, "Re μ by the block's radius", "share of the eigenvalues")
        legend_inside(ax)
    for ax in axes[len(models) :]:
        ax.set_axis_off()
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    blocks = frame.drop_duplicates(["model", "state", "block"])
    fresh = rows(blocks, state="fresh")
    off = (fresh["negative_share"] - 0.5).abs()
    return [
        judge(
            "fresh weights are symmetric: half of the eigenvalues of H have a negative real part",
            "not in the caption; ours: −H has the law of H",
            ", ".join(f"{name} {share:.1%}" for name, share in curve(fresh, "negative_share", by="model").items())
            + f"; farthest block {off.max():.1%} from one half",
            "2/√d for every block: four deviations of a share of d independent signs",
            (off * np.sqrt(fresh["eigenvalues"])).max() < 2,
        ),
        *(_pretrained(rows(blocks, state="pretrained", field=kind), kind) for kind in ("vision", "language")),
    ]


def _pretrained(blocks: pd.DataFrame, kind: str) -> Claim:
    per = blocks.groupby("model", sort=False)["negative_share"].agg(["mean", "min", "max"])
    skewed = kind == "vision"
    spelled = (f"{model} {row['mean']:.1%} ({row['min']:.1%} to {row['max']:.1%})" for model, row in per.iterrows())
    return judge(
        f"pretrained models of {kind} {'skew to the negatives' if skewed else 'have symmetric eigenvalues of H'}",
        "Fig. 5, caption",
        ", ".join(spelled) or "0 models at hand: --data FOLDER",
        "negative share above 55 % in every model" if skewed else "45 to 55 % in every model",
        (per["mean"] > 0.55).all() if skewed else per["mean"].between(0.45, 0.55).all(),
        when=not per.empty,
    )


STUDY = Study("dovonon2025-fig5", Config(), Config(depth=2, width=64), compute, draw, claims)
