"""Dong et al. 2021, Fig. 4: how well do the paths of one length solve a task on which the whole network was trained?

The paper trains attention with skips to sort, to find convex hulls and to memorise, evaluates a few sampled paths of
each length, and finds that short ones do best. Its paths compute their attention anew from their own tokens, and are
not the terms of its Thm 2.1. Here both are evaluated, over all paths of a length: the theorem's terms (attention, norms
and gates frozen at those of the whole network), and the recomputed paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from depthscope import drawing
from depthscope.progress import Share
from depthscope_lab.papers.dong2021.path_networks import (
    READINGS,
    Network,
    Recipe,
    Shape,
    accuracy,
    frozen_terms,
    in_parts,
    plain_norm,
    projection_shares,
    read,
    recomputed_sums,
    sampled_sum,
    train,
)
from depthscope_lab.papers.dong2021.tasks import TASKS, Data, Size, baselines
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, range_line, rows
from depthscope_lab.training.kept import kept

PAPER = {"sorting": 0.98, "convex hull": 0.90, "memorisation": 0.85}  # the whole network, Fig. 4
_RANDOM = {"sorting": 0.10, "convex hull": 0.54, "memorisation": 0.50}
NEAR = 0.05  # of an accuracy
CARRIES = 0.5  # the share of a network's advance over a token without attention that counts as "the majority"
ROUNDING = 1e-8
RISE = 0.02  # of an accuracy, that is no rise
RECOMPUTED = "recomputed"
_COLUMNS = ["part", "task", "seed", "mode", "reading", "length", "value", "error"]
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
SORTING = Recipe(Size(1000, 500, 200, tokens=8, classes=10), Shape(6, 2, 48, positions=True), 65, 30, 3e-4, 1e-5)
CONVEX_HULL = Recipe(Size(10_000, 500, 300, tokens=10), Shape(6, 3, 84), 8, 30, 3e-4, 1e-5, decay=1e-3)
MEMORISATION = Recipe(Size(500, 0, 100, tokens=32), Shape(6, 2, 250, ffn=True), 14, 8, 3e-4, 3e-4, clip=1.0)
Row = dict[str, Any]


@dataclass(frozen=True)
class Config:
    recipes: Mapping[str, Recipe] = field(
        default_factory=lambda: {"sorting": SORTING, "convex hull": CONVEX_HULL, "memorisation": MEMORISATION}
    )
    sampled: int = 5  # paths, as the authors'
    repeats: int = 20  # of the sampling
    trials: int = 3  # seeds
    seed: int = 0  # the first; one more per trial


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """Tidy rows: part, task, seed, mode, reading, length (−1 where none), value, error.

    `accuracy`: on the test set, by mode and reading; modes are `frozen`, `recomputed`, `baseline` and, for the whole
    network, `whole`. `error` is the standard error over sequences, or for sampled paths the standard deviation over
    samples. `share`: what terms of each length (−1: the constant part) add to the whole. `check`: how far the terms are
    from adding up.
    """
    trainings = [(task, config.seed + trial) for task in config.recipes for trial in range(config.trials)]
    work = Work(len(trainings), progress)
    found: list[Row] = []
    for task, seed in trainings:
        part = work.part()
        alone = replace(config, recipes={task: config.recipes[task]}, trials=1)
        one = kept(folder, {"seed of the run": seed, **asdict(alone)}, partial(_one, config, task, seed, part))
        found += [{"task": task, "seed": seed} | row for row in one]
        part(1.0)
    frame = pd.DataFrame(found).reindex(columns=_COLUMNS)
    frame = frame.fillna({"length": -1, "mode": "", "reading": ""})
    return frame.astype({"value": float, "error": float, "length": int})


def _one(config: Config, task: str, seed: int, progress: Share) -> list[Row]:
    """All rows of one task and one seed."""
    recipe = config.recipes[task]
    data = TASKS[task](recipe.size, seed)
    network = train(recipe, data, seed, progress)
    known = {"part": "accuracy", "mode": "baseline"}
    baseline = [{**known, "reading": name, "value": value} for name, value in baselines(task, data).items()]
    return [*baseline, *_evaluate(config, network, data, seed)]


@torch.no_grad()
def _evaluate(config: Config, network: Network, data: Data, seed: int) -> Iterator[Row]:
    inputs, labels = data.test.inputs, data.test.labels

    def score(scores: Tensor) -> Row:
        by_sequence = accuracy(scores, labels)
        return {"value": by_sequence.mean().item(), "error": by_sequence.std().item() / len(by_sequence) ** 0.5}

    yield {"part": "accuracy", "mode": "whole"} | score(network(inputs))
    exact = network.double()
    terms = in_parts(lambda part: frozen_terms(exact, part), inputs, 100)
    error = (terms.sum(dim=0) - exact.encoder(exact.embed(inputs))).abs().max()
    yield {"part": "check", "mode": "frozen", "value": float(error)}
    *shares, constant = projection_shares(terms).tolist()
    for length, share in (*enumerate(shares), (-1, constant)):
        yield {"part": "share", "mode": "frozen", "length": length, "value": share}
    for reading, length in product(READINGS, range(network.shape.depth + 1)):
        row = {"part": "accuracy", "mode": "frozen", "reading": reading, "length": length}
        yield row | score(exact.head(read(terms, reading, length)))
    network = network.float()
    sums = in_parts(lambda part: recomputed_sums(network, part), inputs, 100)
    generator = torch.Generator().manual_seed(seed)
    for length, total in enumerate(sums):
        row = {"part": "accuracy", "mode": RECOMPUTED, "length": length}
        yield row | {"reading": "alone"} | score(network.head(plain_norm(total)))
        drawn = [sampled_sum(network, inputs, length, config.sampled, generator) for _ in range(config.repeats)]
        found = torch.stack([accuracy(network.head(plain_norm(one)), labels).mean() for one in drawn])
        yield row | {"reading": "sampled", "value": found.mean().item(), "error": found.std().item()}


def draw(frame: pd.DataFrame) -> Any:
    """Accuracy by length of path, a panel per task; then the shares of the lengths in the output."""
    tasks = list(frame["task"].unique())
    figure, (*axes, shares) = drawing.panels(len(tasks) + 1, width=4.1, height=3.6)
    for ax, task, own_colour in zip(axes, tasks, drawing.PALETTE, strict=False):
        found = rows(frame, part="accuracy", task=task)
        for (mode, reading), (colour, dashes, name) in _LOOKS.items():
            own = rows(found, mode=mode, reading=reading).groupby("length")["value"]
            range_line(ax, own, colour, name, linestyle=dashes, marker="o", markersize=3)
        for key, (colour, dashes, name) in _LINES.items():
            level = found[(found["mode"] == key) | ((found["mode"] == "baseline") & (found["reading"] == key))]
            ax.axhline(level["value"].mean(), color=colour, linestyle=dashes, linewidth=1, label=name)
        axis(ax, task.capitalize(), "length of paths", "accuracy", ylim=(0, 1.02))
        drawing.legend_below(ax, columns=2)
        share = rows(frame, task=task, part="share").groupby("length")["value"]
        range_line(shares, share, own_colour, task, marker="o", markersize=3)
    shares.axhline(0, color=drawing.GREY, linewidth=0.8)
    axis(shares, "Share of each length in the output", "length (−1: constant part)", "⟨A_k, X⟩ / ⟨X, X⟩")
    drawing.legend_below(shares, columns=3)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    worst = rows(frame, part="check")["value"].max()
    return [
        judge(
            "the sums over all paths of each length and the constant part add up to what leaves the last block",
            "Thm 2.1, for attention and skips; ours: with norms and FFN frozen too",
            f"largest difference {worst:.0e}, float64",
            f"{ROUNDING:g}",
            worst < ROUNDING,
            kind="check",
        ),
        *(claim for task in config.recipes for claim in _of_task(rows(frame, task=task), task, config)),
    ]


def _spelled(levels: pd.DataFrame) -> str:
    """Means over seeds, and the range over seeds, by length."""
    return ", ".join(f"{row.mean():.2f} [{row.min():.2f}, {row.max():.2f}]" for _, row in levels.iterrows())


def _falls(levels: pd.DataFrame) -> bool:
    """Whether the mean over seeds falls from every length to the next, but for rises of at most `RISE`."""
    means = levels.mean(axis=1)
    return bool((means.diff().dropna() <= RISE).all() and means.iloc[0] > means.iloc[-1])


def _of_task(found: pd.DataFrame, task: str, config: Config) -> list[Claim]:
    recipe = config.recipes[task]
    depth, half = recipe.shape.depth, recipe.shape.depth // 2

    def levels(mode: str, reading: str) -> pd.DataFrame:
        """Accuracy by length (rows) and seed (columns)."""
        chosen = rows(found, part="accuracy", mode=mode, reading=reading)
        return chosen.pivot(index="length", columns="seed", values="value")

    def single(mode: str, reading: str = "") -> pd.Series:
        return rows(found, part="accuracy", mode=mode, reading=reading)["value"]

    whole, alone, ceiling = single("whole"), single("baseline", "token alone").mean(), single("baseline", "ceiling")
    frozen, constant, up_to = (levels("frozen", reading) for reading in READINGS)
    recomputed, sampled = (levels(RECOMPUTED, reading) for reading in ("alone", "sampled"))
    learnt, enough = whole.mean() > alone + NEAR, min(PAPER[task], ceiling.mean()) - NEAR
    reached = (up_to.loc[half].mean() - alone) / (whole.mean() - alone) if learnt else math.nan
    spread = curve(found, "error", by="length", mode=RECOMPUTED, reading="sampled").max()
    lacks = "" if learnt else "the network has not learnt more than a token knows of itself"
    caption = "Fig. 4: “performance can be seen to consistently deteriorate with respect to path length”"
    falling = f"no rise of more than {RISE} from one length to the next, mean over seeds, and the last below the first"
    return [
        judge(
            f"{task}: the network learns the task as well as in the paper",
            f"Fig. 4: accuracy {PAPER[task]:.2f}, a “random predictor” {_RANDOM[task]:.2f}",
            f"{whole.mean():.3f} [{whole.min():.3f}, {whole.max():.3f}]; without attention {alone:.3f}, most frequent "
            f"label {single('baseline', 'majority').mean():.3f}, guess {single('baseline', 'guess').mean():.2f}, "
            f"ceiling {ceiling.mean():.3f}",
            f"at least the paper's less {NEAR}, or {NEAR} below the ceiling that the inputs set",
            whole.mean() >= enough,
            f"learning rate {recipe.rate:g} (paper {recipe.paper_rate:g}), {recipe.epochs} epochs of "
            f"{recipe.size.train} sequences; {config.trials} seeds, [least, most]",
        ),
        judge(
            f"{task}: from length 1 on, recomputed paths, all of each length, do worse with every further step",
            caption,
            f"lengths 0 to {depth}: {_spelled(recomputed)}",
            falling,
            _falls(recomputed.loc[1:]),
            lacks=lacks,
        ),
        judge(
            f"{task}: from length 1 on, the theorem's terms do worse the longer their paths are",
            f"{caption}, read as a statement about Thm 2.1",
            f"lengths 0 to {depth}: {_spelled(frozen)}; with the constant part: {_spelled(constant)}",
            f"{falling}; without the constant part, and with it",
            _falls(frozen.loc[1:]) and _falls(constant.loc[1:]),
            lacks=lacks,
        ),
        judge(
            f"{task}: terms of short paths, up to half the depth, carry the majority of the performance",
            "Fig. 4: “short paths are responsible for the majority of the expressive power”",
            f"terms up to length {half} and the constant part: accuracy {up_to.loc[half].mean():.3f}, "
            f"{reached:.0%} of the network's advance over a token without attention",
            f"more than {CARRIES:.0%} of the advance",
            reached > CARRIES,
            f"lengths up to 0, …, {depth}: {_spelled(up_to)}",
            lacks=lacks,
        ),
        judge(
            f"{task}: {config.sampled} sampled paths show what all paths of a length do",
            "Fig. 4: 5 or 20 paths per length, drawn with replacement",
            f"sampled: {_spelled(sampled)}; largest standard deviation between samples {spread:.2f}",
            f"mean over samples within {NEAR} of all paths, at every length",
            (sampled.mean(axis=1) - recomputed.mean(axis=1)).abs().max() < NEAR,
        ),
    ]


BRIEF = {
    "sorting": Recipe(Size(64, 32, 16, tokens=4, classes=4), Shape(3, 2, 16, positions=True), 12, 16, 5e-3, 1e-5),
    "convex hull": Recipe(Size(64, 16, 16, tokens=6), Shape(3, 2, 16), 3, 16, 5e-3, 1e-5),
    "memorisation": Recipe(Size(12, 0, 6, tokens=8), Shape(3, 2, 16, ffn=True), 5, 4, 5e-3, 5e-3),
}
STUDY = Study("dong2021-paths", Config(), Config(BRIEF, repeats=3, trials=2), compute, draw, claims, in_folder=True)
