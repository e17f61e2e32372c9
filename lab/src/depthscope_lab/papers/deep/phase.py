"""Which branch weights α and which strengths τ of de-escalation let 100 blocks train? Theory's lines, drawn before.

A map of τ × α for post-norm and for pre-norm: Vision Transformers of width 32 on scikit-learn's digits. Of every cell,
new: both exponents, in closed form and measured, and what they lead to over the whole depth. Then it is trained for a
short time, at two learning rates. The theory's two thresholds are fitted on another map, of 50 blocks and of other
values of α and τ, and are then used as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pandas as pd

import depthscope.drawing as drawing
from depthscope.progress import Share
from depthscope_lab.papers.deep.phase_claims import NAMES, claims
from depthscope_lab.papers.deep.phase_lines import CHANCE, PRESCRIBED, TRAINS, fitted
from depthscope_lab.papers.deep.phase_runs import Shape, Wiring, trained
from depthscope_lab.papers.deep.phase_theory import closed_form, entrance, measured
from depthscope_lab.papers.study import Study, Work, rows
from depthscope_lab.training.kept import kept

WIRINGS: tuple[Wiring, ...] = get_args(Wiring)
MARGINS = {  # column of the finer grid, 0 on the line → its name in the picture
    "tokens_inside": "above it tokens are too alike",
    "gradient_inside": "inside of it the gradient grows too much",
}
LINE_COLOURS = (drawing.ORANGE, drawing.SKY)


@dataclass(frozen=True)
class Config:
    seed: int = 0
    depth: int = 100
    alphas: tuple[float, ...] = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0)
    taus: tuple[float, ...] = (0.0, 0.1, 0.3, 0.5, 1.0)
    other_depth: int = 50  # of the map that the thresholds are fitted on
    other_alphas: tuple[float, ...] = (0.07, 0.14, 0.3, 0.6, 1.4, 3.0)
    other_taus: tuple[float, ...] = (0.05, 0.15, 0.25, 0.4, 0.9)
    rates: tuple[float, ...] = (1e-3, 3e-3)  # 3e-4 brings no cell of the other map below `TRAINS` in so few steps
    steps: int = 60
    points: int = 31  # of the lines, along either axis


def maps(config: Config) -> dict[str, Shape]:
    """The map that is fitted on, and the map that is judged."""
    rest = (config.rates, config.steps)
    return {
        "fit": Shape(config.other_depth, config.other_alphas, config.other_taus, *rest, seed=config.seed),
        "judged": Shape(config.depth, config.alphas, config.taus, *rest, seed=config.seed),
    }


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """One row per map (fit, judged), wiring and cell; and those of a finer grid without training (lines)."""
    shapes = maps(config)
    cost = {name: len(s.alphas) * len(s.taus) * s.depth * (s.steps * len(s.rates) + 5) for name, s in shapes.items()}
    work = Work(len(WIRINGS) * sum(cost.values()), progress)
    frames = [
        _cells(shape, wiring, folder, work).assign(map=name) for name, shape in shapes.items() for wiring in WIRINGS
    ]
    return with_lines(pd.concat(frames, ignore_index=True), config)


def with_lines(cells: pd.DataFrame, config: Config) -> pd.DataFrame:
    """The cells of both maps with what is expected of them, and a finer grid for the lines of the picture."""
    cells = cells.assign(trains=cells["loss"] < TRAINS * CHANCE, prescribed=PRESCRIBED.inside(cells))
    for prefix in ("", "measured_"):
        lines = fitted(rows(cells, map="fit"), prefix)
        cells[f"{prefix}expected"] = lines.inside(cells, prefix)
        cells[f"{prefix}least_diversity"], cells[f"{prefix}most_growth"] = lines.diversity, lines.growth
    fine = pd.concat([_lines(config, wiring) for wiring in WIRINGS])
    fine["tokens_inside"] = np.log(fine["diversity"] / cells["least_diversity"].iloc[0])
    fine["gradient_inside"] = math.log(cells["most_growth"].iloc[0]) - fine["growth"].abs()
    return pd.concat([cells, fine], ignore_index=True)


def _cells(shape: Shape, wiring: Wiring, folder: Path, work: Work) -> pd.DataFrame:
    given = entrance(shape)
    pairs = [(alpha, tau) for tau in shape.taus for alpha in shape.alphas]
    theory = [closed_form(shape, wiring, alpha, tau, given) for alpha, tau in pairs]
    about = {"wiring": wiring, "depth": shape.depth, "width": shape.width, "seed": shape.seed}
    seen = []
    for alpha, tau in pairs:
        cell = {"run": "measured", "alpha": alpha, "tau": tau, "heads": shape.heads, **about}
        seen += kept(folder, cell, partial(measured, shape, wiring, alpha, tau))
        work(5 * shape.depth)
    found = trained(shape, wiring, folder, work)
    key = ["alpha", "tau"]
    joined = pd.DataFrame(found).merge(pd.DataFrame(theory), on=key).merge(pd.DataFrame(seen), on=key)
    return joined.assign(wiring=wiring, depth=shape.depth)


def _lines(config: Config, wiring: Wiring) -> pd.DataFrame:
    """The closed form on a finer grid, for the lines of the picture."""
    shape = maps(config)["judged"]
    given = entrance(shape)
    alphas = np.geomspace(min(config.alphas), max(config.alphas), config.points)
    taus = np.linspace(min(config.taus), max(config.taus), config.points)
    found = [closed_form(shape, wiring, float(a), float(t), given) for a in alphas for t in taus]
    return pd.DataFrame(found).assign(wiring=wiring, depth=shape.depth, map="lines")


def draw(frame: pd.DataFrame) -> Any:
    """The loss of every cell at its best rate, the two lines over it, and rings where the lines are wrong."""
    judged = rows(frame, map="judged")
    there = [wiring for wiring in WIRINGS if (judged["wiring"] == wiring).any()]
    figure, axes = drawing.panels(len(there), width=4.6, height=4.2)
    colours: Any = None
    for ax, wiring in zip(axes, there, strict=True):
        cells = rows(judged, wiring=wiring)
        table = cells.pivot(index="alpha", columns="tau", values="loss")
        x, y = table.columns.to_numpy(), table.index.to_numpy()
        colours = drawing.paint_plane(ax, table.to_numpy(), x, y, limits=(0.0, CHANCE))
        fine = rows(frame, map="lines", wiring=wiring)
        for (margin, _), colour in zip(MARGINS.items(), LINE_COLOURS, strict=True):
            plane = fine.pivot(index="alpha", columns="tau", values=margin)
            if plane.min().min() < 0 < plane.max().max():
                ax.contour(plane.columns, plane.index, plane.to_numpy(), levels=[0.0], colors=colour, linewidths=2.2)
        wrong = cells[cells["expected"] != cells["trains"]]
        ax.scatter(wrong["tau"], wrong["alpha"], s=260, facecolors="none", edgecolors=drawing.VERMILION, linewidths=1.6)
        blocks = int(cells["depth"].iloc[0])
        drawing.label(ax, f"{NAMES[wiring]}, {blocks} blocks", "τ, strength of de-escalation", "α, weight of branches")
    for name, colour in zip(MARGINS.values(), LINE_COLOURS, strict=True):
        axes[0].plot([], [], color=colour, linewidth=2.2, label=name)
    axes[0].scatter([], [], s=80, facecolors="none", edgecolors=drawing.VERMILION, label="the lines are wrong")
    figure.colorbar(colours, ax=axes, label="training loss at the end")
    drawing.shared_legend(figure, axes[0], columns=3 if len(there) > 1 else 1)
    return figure


STUDY = Study(
    "depth-phase",
    full=Config(),
    quick=Config(
        depth=4,
        alphas=(0.1, 0.5, 2.0),
        taus=(0.0, 1.0),
        other_depth=3,
        other_alphas=(0.2, 1.0),
        other_taus=(0.5,),
        rates=(1e-3, 1e-2),
        steps=4,
        points=7,
    ),
    compute=compute,
    draw=draw,
    claims=claims,
    in_folder=True,
)
