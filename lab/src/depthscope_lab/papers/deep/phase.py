"""Which branch weights α and which strengths τ of de-escalation let 100 blocks train? Theory's lines, drawn before.

A map of τ × α for post-norm and for pre-norm: Vision Transformers of width 32 on scikit-learn's digits. Of every cell,
new: t_div and the growth of the gradient over the whole depth, in closed form. Then it is trained for a short time, at
two learning rates; the loss on the last fifth of the training images chooses the rate. A cell is expected to train if
t_div after the last block is at least one threshold, and the gradient's growth over the whole depth is at most another.
Both are fitted on another map, of 50 blocks and of other values of α and τ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import depthscope.drawing as drawing
from depthscope.measures import token_similarity
from depthscope.models import BlockConfig, VisionTransformer
from depthscope.models.initialisers import HE, XAVIER, Scheme, draw_block
from depthscope.progress import Share
from depthscope.remedies import DeEscalate, ResidualWeight, apply
from depthscope.theory import Gains, course
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, rows
from depthscope_lab.training.data import LabelledImages, load_digits
from depthscope_lab.training.data.order import batch_indices
from depthscope_lab.training.kept import kept

Wiring = Literal["post", "pre"]
Row = dict[str, Any]
WIRINGS: dict[Wiring, str] = {"post": "post-norm", "pre": "pre-norm"}
MARGINS = {  # column of the finer grid, 0 on the line → its name in the picture, its colour
    "tokens_inside": ("above it tokens are too alike", drawing.ORANGE),
    "gradient_inside": ("inside of it the gradient grows too much", drawing.SKY),
}
CHANCE = math.log(10)
TRAINS = 0.7  # of ln 10: a cell with a smaller loss at the end has trained
LAST = 10  # steps whose mean loss counts
WANTED = 0.9  # of the balanced accuracy
ENOUGH = 30  # steps below which nothing is judged
# Thresholds that are tried, evenly in their logarithms: half an order of magnitude apart.
THRESHOLDS = [*product((10 ** (-half / 2) for half in range(1, 25)), (10 ** (half / 2) for half in range(1, 25)))]


@dataclass(frozen=True)
class Map:
    """The cells are all pairs of `alphas` and `taus`."""

    depth: int
    alphas: tuple[float, ...]
    taus: tuple[float, ...]


FIT = Map(50, (0.07, 0.14, 0.3, 0.6, 1.4, 3.0), (0.05, 0.15, 0.25, 0.4, 0.9))
JUDGED = Map(100, (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 2.0), (0.0, 0.1, 0.3, 0.5, 1.0))


@dataclass(frozen=True)
class Config:
    seed: int = 0
    fit: Map = FIT  # that the thresholds are fitted on
    judged: Map = JUDGED
    rates: tuple[float, ...] = (1e-3, 3e-3)  # 3e-4 brings no cell of the first map below `TRAINS` in so few steps
    steps: int = 60
    batch: int = 32
    width: int = 32
    heads: int = 2
    points: int = 31  # of the lines, along either axis


def inside(cells: pd.DataFrame, diversity: float, growth: float) -> pd.Series:
    """Which cells are expected to train: t_div at least one threshold, the gradient's growth at most the other."""
    return (cells["diversity"] >= diversity) & (cells["growth"].abs() <= math.log(growth))


def balanced_accuracy(expected: Sequence[bool] | pd.Series, trains: Sequence[bool] | pd.Series) -> float:
    """Mean of the shares that are right among cells that train and among cells that do not; nan if one is empty."""
    came = pd.Series(list(trains), dtype=bool)
    right = pd.Series(list(expected), dtype=bool) == came
    return float(right.groupby(came).mean().mean()) if came.nunique() == 2 else math.nan


def fitted(cells: pd.DataFrame) -> tuple[float, float]:
    """The pair of thresholds with the best balanced accuracy on these cells (`trains`); of several that are equally
    good, the one nearest to the middle of them all, on logarithmic scales.
    """
    found = {pair: balanced_accuracy(inside(cells, *pair), cells["trains"]) for pair in THRESHOLDS}
    best = max(found.values())  # nan where all cells train, or none does: then nothing can be fitted
    tied = [pair for pair, accuracy in found.items() if math.isnan(best) or math.isclose(accuracy, best)]
    middle = np.log(tied).mean(axis=0)
    return min(tied, key=lambda pair: math.dist(np.log(pair), middle))


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """One row per map (fit, judged), wiring and cell, with what is expected of it; and a finer grid (lines)."""
    maps, judged = {"fit": config.fit, "judged": config.judged}, config.judged
    cells = [(n, m.depth, *rest) for n, m in maps.items() for rest in product(WIRINGS, m.taus, m.alphas)]
    work, found = Work(config.steps * len(config.rates) * sum(depth for _, depth, *_ in cells), progress), []
    for name, depth, wiring, tau, alpha in cells:
        runs = []
        for rate in config.rates:
            part = work.part(config.steps * depth)
            key = {"wiring": wiring, "alpha": alpha, "tau": tau, "depth": depth, "rate": rate, "seed": config.seed}
            key |= {name: getattr(config, name) for name in ("width", "heads", "steps", "batch")}
            runs.append(kept(folder, key, partial(train, config, depth, wiring, alpha, tau, rate, part)))
            part(1.0)
        about = {"map": name, "wiring": wiring, "depth": depth}
        found.append(about | chosen_rate(runs) | closed_form(config, depth, wiring, alpha, tau))
    frame = pd.DataFrame(found)
    frame = frame.assign(trains=frame["loss"] < TRAINS * CHANCE)
    diversity, growth = fitted(rows(frame, map="fit"))
    frame = frame.assign(expected=inside(frame, diversity, growth), least_diversity=diversity, most_growth=growth)
    alphas = np.geomspace(min(judged.alphas), max(judged.alphas), config.points).tolist()
    taus = np.linspace(min(judged.taus), max(judged.taus), config.points).tolist()
    grid = product(WIRINGS, alphas, taus)
    fine = pd.DataFrame([{"wiring": w, **closed_form(config, judged.depth, w, alpha, tau)} for w, alpha, tau in grid])
    fine["tokens_inside"] = np.log(fine["diversity"] / diversity)
    fine["gradient_inside"] = math.log(growth) - fine["growth"].abs()
    return pd.concat([frame, fine.assign(depth=judged.depth, map="lines")], ignore_index=True)


def closed_form(config: Config, depth: int, wiring: Wiring, alpha: float, tau: float) -> Row:
    """t_div after the last block; ln of the gradient's growth over all blocks."""
    count, similarity, energy = entrance(config, depth)
    gains = Gains(attention=1.0, ffn=2.0, score=1.0, tokens=count)  # of Xavier's attention and He's FFN
    found = course(depth, alpha, tau, gains, placement=wiring, similarity=similarity, energy=energy)
    return {"alpha": alpha, "tau": tau, "diversity": 1 / (1 + found.odds[-1]), "growth": found.growth}


@cache
@torch.no_grad()
def entrance(config: Config, depth: int) -> tuple[int, float, float]:
    """Tokens per image, and similarity and mean square of the tokens that enter block 1; means over eight images."""
    model, heard = build(config, depth, "post"), []
    model.encoder.register_forward_pre_hook(lambda _module, inputs: heard.append(inputs[0]))
    model(pixels(digits().train_images[:8]))
    (tokens,) = heard
    return tokens.shape[-2], token_similarity(tokens).mean().item(), tokens.double().square().mean().item()


@cache
def digits() -> LabelledImages:
    """Training images, and in place of the test images those that choose the rate."""
    return load_digits().for_tuning()


def pixels(images: Tensor) -> Tensor:
    """Bytes → numbers of mean 0 and variance 1."""
    return (images.float() / digits().white - digits().mean[0]) / digits().std[0]


def build(config: Config, depth: int, wiring: Wiring) -> VisionTransformer:
    """The plain model, without α and τ, by Xavier and He. Its class token is as large as its patches."""
    generator = torch.Generator().manual_seed(config.seed)
    laws = partial(draw_block, Scheme(XAVIER, XAVIER, XAVIER, HE))
    block = BlockConfig(config.width, config.heads, 2 * config.width, placement=wiring, initialise=laws)
    model = VisionTransformer(depth, block, image_size=8, patch_size=4, channels=1, generator=generator)
    assert model.class_token is not None
    nn.init.normal_(model.class_token, generator=generator)
    return model


def train(config: Config, depth: int, wiring: Wiring, alpha: float, tau: float, rate: float, progress: Share) -> Row:
    """The losses of all steps; loss and accuracy on the images held back.

    All models have the same weights when new and see the same images in the same order.
    """
    model, data = build(config, depth, wiring), digits()
    apply(model, ResidualWeight(alpha), *([DeEscalate(tau, at="output")] if tau else []))
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, fused=True)

    def loss_of(step: int) -> Tensor:
        chosen = batch_indices(config.seed, step, len(data.train_images), config.batch)
        return F.cross_entropy(model(pixels(data.train_images[chosen])), data.train_labels[chosen])

    losses = []
    for step, loss in steps(loss_of, optimiser, config.steps):
        losses.append(loss)
        progress((step + 1) / config.steps)
    with torch.no_grad():
        scores = model(pixels(data.test_images))
    valid = F.cross_entropy(scores, data.test_labels).item()
    right = (scores.argmax(dim=-1) == data.test_labels).double().mean().item()
    return {"rate": rate, "losses": losses, "valid_loss": valid, "valid_accuracy": right}


def chosen_rate(runs: list[Row]) -> Row:
    """Of one cell's runs, that with the least loss on the images held back; the first one where all have failed.

    `loss` is the mean over the last steps; infinite where a number was not finite.
    """
    best = min(runs, key=lambda row: math.inf if row["valid_loss"] is None else row["valid_loss"])
    end, failed = best["losses"][-LAST:], None in best["losses"] or best["valid_loss"] is None
    about = {name: best[name] for name in best if name != "losses"}
    return about | {"loss": math.inf if failed else sum(end) / len(end)}


def draw(frame: pd.DataFrame) -> Any:
    """The loss of every cell at its best rate, the two lines over it, and rings where the lines are wrong."""
    figure, axes = drawing.panels(len(WIRINGS), width=4.6, height=4.2)
    colours: Any = None
    ring: dict[str, Any] = {"facecolors": "none", "edgecolors": drawing.VERMILION, "linewidths": 1.6}
    for ax, (wiring, name) in zip(axes, WIRINGS.items(), strict=True):
        cells = rows(frame, map="judged", wiring=wiring)
        table = cells.pivot(index="alpha", columns="tau", values="loss")
        x, y = table.columns.to_numpy(), table.index.to_numpy()
        colours = drawing.paint_plane(ax, table.to_numpy(), x, y, limits=(0.0, CHANCE))
        for margin, (meaning, colour) in MARGINS.items():
            plane = rows(frame, map="lines", wiring=wiring).pivot(index="alpha", columns="tau", values=margin)
            if plane.min().min() < 0 < plane.max().max():
                ax.contour(plane.columns, plane.index, plane.to_numpy(), levels=[0.0], colors=colour, linewidths=2.2)
            ax.plot([], [], color=colour, linewidth=2.2, label=meaning)
        wrong = cells[cells["expected"] != cells["trains"]]
        ax.scatter(wrong["tau"], wrong["alpha"], s=260, label="the lines are wrong", **ring)
        title = f"{name}, {int(cells['depth'].iloc[0])} blocks"
        axis(ax, title, "τ, strength of de-escalation", "α, weight of branches")
    figure.colorbar(colours, ax=axes, label="training loss at the end")
    drawing.shared_legend(figure, axes[0], columns=3)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    """Of the judged map of post-norm: every cell of pre-norm trains, so that nothing could be told apart there."""
    cells = rows(frame, map="judged", wiring="post")
    accuracy, first = balanced_accuracy(cells["expected"], cells["trains"]), cells.iloc[0]
    trained, right = int(cells["trains"].sum()), int((cells["expected"] == cells["trains"]).sum())
    mixed = not math.isnan(accuracy)
    return [
        judge(
            "post-norm: the theory's two lines predict which cells train",
            "ours; thresholds fitted on another map, of other depth, α and τ: t_div ≥ "
            f"{first['least_diversity']:.2g} after the last block, the gradient within a factor of "
            f"{first['most_growth']:.2g}",
            f"{trained} of {len(cells)} cells train, the lines are right about {right}; "
            + (f"balanced accuracy {accuracy:.2f}" if mixed else "the other side is empty"),
            f"a balanced accuracy of {WANTED:g} at least; a cell trains if its training loss ends below "
            f"{TRAINS:g}·ln 10",
            accuracy >= WANTED,
            when=mixed,
            lacks="" if config.steps >= ENOUGH else f"needs {ENOUGH} steps",
        )
    ]


QUICK = Config(0, Map(3, (0.2, 1.0), (0.5,)), Map(4, (0.1, 0.5, 2.0), (0.0, 1.0)), (1e-2, 1e-3), 4, points=7)
STUDY = Study("depth-phase", Config(), QUICK, compute, draw, claims, in_folder=True)
