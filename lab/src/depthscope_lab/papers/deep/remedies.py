"""Which remedy when: published wirings and remedies, trained at 12, 48 and 100 blocks under the fair protocol.

Vision Transformers of width 32 on scikit-learn's digits. At each depth every variant has the learning rate that suits
it, of a grid that is the same for all and is judged on validation data, and three fresh seeds that are judged on test
data (`depthscope compare --tune`). Steps, batch and data are the same for all variants of a depth. Patches of 4 × 4
make five tokens of an image, with the class token: with 17 tokens, runs of this length learn next to nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope.report.formats import WATCHED
from depthscope_lab.papers.deep.remedies_claims import INITIAL, claims
from depthscope_lab.papers.fair import measured, train_fairly
from depthscope_lab.papers.study import Study, Work, rows
from depthscope_lab.training.comparison import Launch
from depthscope_lab.training.protocol import Protocol
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.variants import label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# peri is left out: here it is sandwich but for one norm.
WIRINGS = (
    *("post", "pre", "sandwich", "res-post", "rezero", "layer-scale", "sqrt-depth", "ln-scaling", "deep-norm", "admin"),
    *("keel", "b2t", "resi-dual", "mix-ln", "hybrid-norm"),
)
IN_POST = (
    *("deescalated", "deescalated(tau=0.5)", "residual-weight", "mv-split", "contra-norm", "pair-norm"),
    *("feat-scale", "attn-scale", "centred-attention", "neutreno", "value-residual"),
)
ALL = (*WIRINGS, *IN_POST)
LABELS = {variant: label_of(variant) for variant in ALL}
AT_48 = ("post", "pre", "layer-scale", "deep-norm", "deescalated", "mv-split")
AT_12 = (*AT_48, "rezero", "res-post", "sqrt-depth", "residual-weight", "contra-norm", "neutreno")


@dataclass(frozen=True)
class Stage:
    """What is trained at a depth. `lr` is the middle of the grid: a third, once, three times."""

    depth: int
    steps: int
    lr: float
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    form: Literal["full", "small", "quick"] = "full"
    stages: tuple[Stage, ...] = (
        Stage(12, 100, 3e-3, ALL),
        Stage(48, 80, 1.5e-3, ALL),
        Stage(100, 80, 1.5e-3, ALL),
    )
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {"width": 32, "ffn_width": 64, "heads": 4, "patch_size": 4, "batch_size": 32}
    )
    more: int = 2  # rates beyond the grid
    trials: int = 3  # fresh seeds, at least 3
    seed: int = 0  # the seeds that are judged follow it; rates are chosen with seed 0


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """The table of `studies.fair`; t_sim at initialisation (last block, behind its FFN) is a quantity of its own."""
    recipe, frames = RECIPES["vit-digits"], []
    cost = [stage.depth * stage.steps * len(stage.variants) for stage in config.stages]
    work = Work(sum(cost), progress)
    for size, stage in zip(cost, config.stages, strict=True):
        configs = [
            recipe(variant).changed(depth=stage.depth, lr=stage.lr, **config.settings) for variant in stage.variants
        ]
        seeds = tuple(range(config.seed + 1, config.seed + 1 + config.trials))
        protocol = Protocol(stage.steps, more=config.more, seeds=seeds)
        rare = dict.fromkeys(("evaluate_every", "checkpoint_every", "watch_every"), stage.steps)  # at 0, at the end
        options = {"tracker": "none", "draw": False, **rare}
        launch = Launch(folder / f"{config.form}-{stage.depth}", in_process=True, options=options)
        frames.append(train_fairly(configs, protocol, launch, work.part(size)))
    frame = pd.concat(frames, ignore_index=True)
    frame.loc[(frame["quantity"] == WATCHED) & (frame["step"] == 0), "quantity"] = INITIAL
    return frame


def draw(frame: pd.DataFrame) -> Figure:
    """Above: the test loss of every seed, best variant on top. Below: t_sim at initialisation against it."""
    runs = measured(frame)
    depths = sorted(runs["depth"].unique())
    figure, axes = drawing.panels(len(depths), 2, width=4.4, height=4.6)
    for column, depth in enumerate(depths):
        losses, initial = (rows(runs, depth=depth, quantity=quantity) for quantity in ("test_loss", INITIAL))
        _draw_losses(axes[column], losses, int(depth))
        _draw_against_similarity(axes[len(depths) + column], losses, initial)
    return figure


def _draw_losses(ax: Axes, losses: pd.DataFrame, depth: int) -> None:
    means = losses.groupby("variant")["value"].mean().sort_values(ascending=False)
    for place, (variant, mean) in enumerate(means.items()):
        values = losses.loc[losses["variant"] == variant, "value"]
        colour = _colour(str(variant))
        ax.plot(values, [place] * len(values), "|", color=colour, markersize=7)
        ax.plot([values.min(), values.max()], [place, place], color=colour, linewidth=1.2)
        ax.plot([mean], [place], "o", color=colour, markersize=4)
    ax.set_yticks(range(len(means)), [LABELS[str(name)] for name in means.index])
    drawing.label(ax, f"{depth} blocks", "test loss: mean and three seeds", "")


def _draw_against_similarity(ax: Axes, losses: pd.DataFrame, similarity: pd.DataFrame) -> None:
    loss, alike = (part.groupby("variant")["value"].mean() for part in (losses, similarity))
    for name, variants in (("plain", ("post", "pre")), ("wirings", WIRINGS), ("remedies in post-norm", IN_POST)):
        shown = [one for one in loss.index if one in variants and (name == "plain") == (one in ("post", "pre"))]
        if shown:
            ax.plot(alike.reindex(shown), loss.reindex(shown), "o", color=_colour(shown[0]), markersize=4, label=name)
    drawing.label(ax, "", "t_sim at initialisation, last block", "test loss, mean over seeds")
    drawing.legend_inside(ax)


def _colour(variant: str) -> str:
    if variant in ("post", "pre"):
        return drawing.VERMILION
    return drawing.BLUE if variant in WIRINGS else drawing.GREEN


STUDY = Study(
    name="remedies",
    full=Config(),
    quick=Config(
        form="quick",
        stages=(Stage(2, 3, 1e-3, ("post", "pre", "deescalated")),),
        settings={"width": 8, "ffn_width": 8, "heads": 2, "patch_size": 4, "batch_size": 8},
        more=0,
    ),
    compute=compute,
    draw=draw,
    claims=claims,
    in_folder=True,
    scales={
        "small": Config(  # the most telling first, so that an interrupted one has something to say
            form="small",
            stages=(
                Stage(48, 40, 1.5e-3, AT_48),
                Stage(12, 50, 3e-3, AT_12),
                Stage(100, 40, 1.5e-3, ("post", "pre", "deescalated")),
            ),
        )
    },
)
