"""Dong et al. 2021, Fig. 4: how well do the paths of one length solve a task on which the whole network was trained?

The paper trains attention with skips to sort, to find convex hulls and to memorise, evaluates a few sampled paths of
each length, and finds that short ones do best. Its paths compute their attention anew from their own tokens, and are
not the terms of its Thm 2.1. Here both are evaluated, over all paths of a length: the theorem's terms (attention, norms
and gates frozen at those of the whole network), and the recomputed paths. Beside it, ours: the shares of the terms
while the network learns to sort.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
import torch
from torch import Tensor

from depthscope import drawing
from depthscope.progress import Share
from depthscope_lab.papers.dong2021.path_model import Network, Shape
from depthscope_lab.papers.dong2021.path_modes import (
    READINGS,
    accuracy,
    frozen_terms,
    in_parts,
    plain_norm,
    projection_shares,
    read,
    recomputed_sums,
    sampled_sum,
)
from depthscope_lab.papers.dong2021.path_training import Recipe, Row, train
from depthscope_lab.papers.dong2021.path_verdicts import claims
from depthscope_lab.papers.dong2021.tasks import TASKS, Data, Examples, Size, baselines
from depthscope_lab.papers.study import Study, Work, curve, rows
from depthscope_lab.training.kept import kept

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLUMNS = ["part", "task", "seed", "step", "mode", "reading", "length", "value", "error"]
RECOMPUTED = "recomputed"
_LOOKS = {
    ("frozen", "alone"): (drawing.BLUE, "-", "the theorem's terms"),
    ("frozen", "with constant"): (drawing.SKY, "--", "…with the constant part"),
    (RECOMPUTED, "alone"): (drawing.VERMILION, "-", "recomputed, all paths"),
    (RECOMPUTED, "sampled"): (drawing.ORANGE, ":", "recomputed, paths sampled"),
    ("frozen", "up to"): (drawing.GREEN, "-.", "terms up to this length"),
}
_LINES = {
    "whole": (drawing.BLACK, "-", "whole network"),
    "token alone": (drawing.GREY, "--", "a token without attention"),
    "majority": (drawing.GREY, ":", "most frequent label"),
}


@dataclass(frozen=True)
class Config:
    recipes: Mapping[str, Recipe] = field(
        default_factory=lambda: {
            "sorting": Recipe(
                Size(1000, 500, 200, tokens=8, classes=10),
                Shape(6, 2, 48, positions=True),
                epochs=65,
                batch=30,
                rate=3e-4,
                paper_rate=1e-5,
            ),
            "convex hull": Recipe(
                Size(10_000, 500, 300, tokens=10),
                Shape(6, 3, 84),
                epochs=8,
                batch=30,
                rate=3e-4,
                paper_rate=1e-5,
                decay=1e-3,
            ),
            "memorisation": Recipe(
                Size(500, 0, 100, tokens=32),
                Shape(6, 2, 250, ffn=True),
                epochs=14,
                batch=8,
                rate=3e-4,
                paper_rate=3e-4,
                clip=1.0,
            ),
        }
    )
    as_printed: tuple[str, ...] = ("sorting",)  # also trained at the paper's rate, with the first seed
    observed: tuple[int, ...] = (0, 10, 30, 100, 300, 1000, 2210)  # steps of sorting
    sampled: int = 5  # paths, as the authors'
    repeats: int = 20  # of the sampling
    trials: int = 3  # seeds
    seed: int = 0  # the first; one more per trial


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """Tidy rows: part, task, seed, step, mode, reading, length (−1 where none), value, error.

    `accuracy`: on the test set, by mode and reading; modes are `frozen`, `recomputed`, `baseline` and, for the whole
    network, `whole` (`validation` and `training` on those sets). `error` is the standard error over sequences, or for
    sampled paths the standard deviation over samples. `share`: what terms of each length (−1: the constant part) add
    to the whole, at the end and, for sorting, while it is trained (`moving`, with the accuracy as reading `whole`).
    `as printed`: trained at the paper's rate. `check`: how far the terms are from adding up.
    """
    trainings = [(task, config.seed + trial) for task in config.recipes for trial in range(config.trials)]
    work = Work(len(trainings), progress)
    found: list[Row] = []
    for task, seed in trainings:
        told = work.part()
        alone = replace(config, recipes={task: config.recipes[task]}, trials=1)
        one = kept(folder, {"seed of the run": seed, **asdict(alone)}, partial(_one, config, task, seed, told))
        found += [{"task": task, "seed": seed} | row for row in one]
        told(1.0)
    frame = pd.DataFrame(found).reindex(columns=_COLUMNS)
    frame = frame.astype({"value": float, "error": float})
    for column in ("step", "length"):
        frame[column] = frame[column].fillna(-1).astype(int)
    return frame.fillna({"mode": "", "reading": ""})


def _one(config: Config, task: str, seed: int, progress: Share) -> list[Row]:
    """All rows of one task and one seed."""
    recipe = config.recipes[task]
    data = TASKS[task](recipe.size, seed)
    network, found = train(
        recipe,
        data,
        recipe.rate,
        seed,
        observed=config.observed if task == "sorting" else (),
        observe=lambda network: list(_moving(network, data.test)),
        progress=progress,
    )
    for name, value in baselines(task, data).items():
        found.append({"part": "accuracy", "mode": "baseline", "reading": name, "value": value})
    found += _evaluate(config, network, data, seed)
    if task in config.as_printed and seed == config.seed and recipe.paper_rate != recipe.rate:
        printed, _ = train(recipe, data, recipe.paper_rate, seed)
        found.append({"part": "as printed", "mode": "whole"} | _score(printed(data.test.inputs), data.test.labels))
    return found


@torch.no_grad()
def _evaluate(config: Config, network: Network, data: Data, seed: int) -> Iterator[Row]:
    inputs, labels = data.test.inputs, data.test.labels
    depth = network.shape.depth
    for name, examples in (("whole", data.test), ("validation", data.validation), ("training", data.train)):
        yield {"part": "accuracy", "mode": name} | _score(network(examples.inputs), examples.labels)
    exact = network.double()
    terms = in_parts(lambda part: frozen_terms(exact, part), inputs, 100)
    error = (terms.sum(dim=0) - exact.encoder(exact.embed(inputs))).abs().max()
    yield {"part": "check", "mode": "frozen", "value": float(error)}
    for length, share in enumerate(projection_shares(terms).tolist()):
        yield {"part": "share", "mode": "frozen", "length": length if length <= depth else -1, "value": share}
    for reading in READINGS:
        for length in range(depth + 1):
            scores = exact.head(read(terms, reading, length))
            row = {"part": "accuracy", "mode": "frozen", "reading": reading.name, "length": length}
            yield row | _score(scores, labels)
    network = network.float()
    sums = in_parts(lambda part: recomputed_sums(network, part), inputs, 100)
    generator = torch.Generator().manual_seed(seed)
    for length, total in enumerate(sums):
        row = {"part": "accuracy", "mode": RECOMPUTED, "length": length}
        yield row | {"reading": "alone"} | _score(network.head(plain_norm(total)), labels)
        drawn = [
            accuracy(network.head(plain_norm(one)), labels).mean()
            for one in (sampled_sum(network, inputs, length, config.sampled, generator) for _ in range(config.repeats))
        ]
        found = torch.stack(drawn)
        yield row | {"reading": "sampled", "value": found.mean().item(), "error": found.std().item()}


@torch.no_grad()
def _moving(network: Network, test: Examples) -> Iterator[Row]:
    terms = frozen_terms(network, test.inputs)
    for length, share in enumerate(projection_shares(terms).tolist()):
        row = {"part": "moving", "mode": "frozen", "reading": "share", "value": share}
        yield row | {"length": length if length <= network.shape.depth else -1}
    yield {"part": "moving", "mode": "whole", "reading": "whole"} | _score(network(test.inputs), test.labels)


def _score(scores: Tensor, labels: Tensor) -> Row:
    by_sequence = accuracy(scores, labels)
    return {"value": by_sequence.mean().item(), "error": by_sequence.std().item() / len(by_sequence) ** 0.5}


def draw(frame: pd.DataFrame) -> Figure:
    """Above: accuracy by length of path. Below: the shares of the lengths, each length left out, shares in training."""
    tasks = list(frame["task"].unique())
    columns = max(3, len(tasks))
    figure, axes = drawing.panels(columns, rows=2, width=4.1, height=3.6)
    accuracies = rows(frame, part="accuracy")
    for ax, task in zip(axes, tasks, strict=False):
        _draw_accuracy(ax, rows(accuracies, task=task), task)
    shares, omitted, moving = axes[columns : columns + 3]
    parts = (
        (shares, rows(frame, part="share")),
        (omitted, rows(accuracies, mode="frozen", reading="without")),
    )
    for ax, part in parts:
        for task, colour in zip(tasks, drawing.PALETTE, strict=False):
            found = rows(part, task=task).groupby("length")["value"]
            drawing.band(ax, found.min().index, found.min(), found.max(), colour=colour)
            ax.plot(found.mean().index, found.mean(), color=colour, marker="o", markersize=3, label=task)
        drawing.legend_below(ax, columns=3)
    shares.axhline(0, color=drawing.GREY, linewidth=0.8)
    omitted.set_ylim(0, 1.02)
    drawing.label(shares, "Share of each length in the output", "length (−1: constant part)", "⟨A_k, X⟩ / ⟨X, X⟩")
    drawing.label(omitted, "One length of the theorem's terms left out", "length that is left out", "accuracy")
    _draw_moving(moving, rows(frame, part="moving"))
    return figure


def _draw_accuracy(ax: Axes, found: pd.DataFrame, task: str) -> None:
    for (mode, reading), (colour, line, name) in _LOOKS.items():
        own = rows(found, mode=mode, reading=reading).groupby("length")["value"]
        drawing.band(ax, own.min().index, own.min(), own.max(), colour=colour)
        ax.plot(own.mean().index, own.mean(), color=colour, linestyle=line, label=name, marker="o", markersize=3)
    for key, (colour, line, name) in _LINES.items():
        level = found[(found["mode"] == key) | ((found["mode"] == "baseline") & (found["reading"] == key))]
        ax.axhline(level["value"].mean(), color=colour, linestyle=line, linewidth=1, label=name)
    ax.set_ylim(0, 1.02)
    drawing.label(ax, task.capitalize(), "length of paths", "accuracy")
    drawing.legend_below(ax, columns=2)


def _draw_moving(ax: Axes, moving: pd.DataFrame) -> None:
    shares = rows(moving, reading="share")
    for length, colour in zip(sorted(shares["length"].unique()), (drawing.GREY, *drawing.PALETTE), strict=False):
        own = curve(shares, "step", length=length)
        name = f"length {length}" if length >= 0 else "constant part"
        ax.plot(own.index, own, color=colour, marker="o", markersize=3, label=name)
    whole = curve(moving, "step", reading="whole")
    ax.plot(whole.index, whole, color=drawing.BLACK, linestyle=":", label="accuracy")
    ax.set_xscale("symlog", linthresh=10)
    ax.set_xlim(0, None)
    drawing.label(ax, "Sorting: the shares while it is trained", "step", "share of each length; accuracy")
    drawing.legend_below(ax, columns=3)


STUDY = Study(
    "dong2021-paths",
    full=Config(),
    quick=Config(
        recipes={
            "sorting": Recipe(
                Size(64, 32, 16, tokens=4, classes=4),
                Shape(3, 2, 16, positions=True),
                epochs=12,
                batch=16,
                rate=5e-3,
                paper_rate=1e-5,
            ),
            "convex hull": Recipe(
                Size(64, 16, 16, tokens=6), Shape(3, 2, 16), epochs=3, batch=16, rate=5e-3, paper_rate=1e-5
            ),
            "memorisation": Recipe(
                Size(12, 0, 6, tokens=8), Shape(3, 2, 16, ffn=True), epochs=5, batch=4, rate=5e-3, paper_rate=5e-3
            ),
        },
        observed=(0, 10, 48),
        repeats=3,
        trials=2,
    ),
    compute=compute,
    draw=draw,
    claims=claims,
    in_folder=True,
)
