"""Dong et al. 2021, Fig. 4: how well do the paths of one length solve a task on which the whole network was trained?

The paper trains attention with skips to sort, to find convex hulls and to memorise, evaluates a few sampled paths of
each length, and finds that short ones do best. Its paths compute their attention anew from their own tokens, and are
not the terms of its Thm 2.1. Here both are evaluated, over all paths of a length: the theorem's terms (attention, norms
and gates frozen at those of the whole network), and the recomputed paths.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
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
    TASKS,
    Data,
    Network,
    Recipe,
    frozen_terms,
    plain_norm,
    recomputed_sums,
    sampled_sum,
    train,
    without_attention,
)
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, range_line, rows
from depthscope_lab.training.kept import kept

NEAR = 0.05  # of an accuracy
CARRIES = 0.5  # the share of a network's advance over a token without attention that counts as "the majority"
ROUNDING = 1e-8
RISE = 0.02  # of an accuracy, that is no rise
RECOMPUTED = "recomputed"
# Which of the frozen terms are given to the readout, of (length, length asked about); and whether the constant part is.
READINGS: dict[str, tuple[Callable[[int, int], bool], bool]] = {
    "alone": (operator.eq, False),
    "with constant": (operator.eq, True),
    "up to": (operator.le, True),
}
_CURVES = {
    ("frozen", "alone"): (drawing.BLUE, "-", "the theorem's terms"),
    ("frozen", "with constant"): (drawing.SKY, "--", "…with the constant part"),
    (RECOMPUTED, "alone"): (drawing.VERMILION, "-", "recomputed, all paths"),
    (RECOMPUTED, "sampled"): (drawing.ORANGE, ":", "recomputed, paths sampled"),
    ("frozen", "up to"): (drawing.GREEN, "-.", "terms up to this length"),
}
_LEVELS = {
    ("whole", ""): (drawing.BLACK, "-", "whole network"),
    ("token alone", ""): (drawing.GREY, "--", "a token without attention"),
}
SORTING = Recipe(1000, 500, 200, 8, depth=6, heads=2, width=48, epochs=65, batch=30, rate=3e-4, paper_rate=1e-5)
SORTING = replace(SORTING, classes=10, positions=True)
CONVEX_HULL = Recipe(10_000, 500, 300, 10, depth=6, heads=3, width=84, epochs=8, batch=30, rate=3e-4, paper_rate=1e-5)
CONVEX_HULL = replace(CONVEX_HULL, decay=1e-3)
MEMORISATION = Recipe(500, 0, 100, 32, depth=6, heads=2, width=250, epochs=14, batch=8, rate=3e-4, paper_rate=3e-4)
MEMORISATION = replace(MEMORISATION, ffn=True, clip=1.0)
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

    `accuracy`: on the test set, by mode and reading; modes are `frozen`, `recomputed`, `whole` (the network) and
    `token alone`. `error`: for sampled paths, the standard deviation over samples. `check`: how far the terms are
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
    frame = pd.DataFrame(found).reindex(columns=["part", "task", "seed", "mode", "reading", "length", "value", "error"])
    frame = frame.fillna({"part": "accuracy", "reading": "", "length": -1})
    return frame.astype({"value": float, "error": float, "length": int})


def _one(config: Config, task: str, seed: int, progress: Share) -> list[Row]:
    """All rows of one task and one seed."""
    data = TASKS[task](config.recipes[task], seed)
    network = train(config.recipes[task], data, seed, progress)
    return [{"mode": "token alone", "value": without_attention(task, data)}, *_evaluate(config, network, data, seed)]


@torch.no_grad()
def _evaluate(config: Config, network: Network, data: Data, seed: int) -> Iterator[Row]:
    inputs, labels = data.test

    def score(scores: Tensor) -> Row:
        """The share of tokens that are labelled rightly."""
        return {"value": (scores.argmax(dim=-1) == labels).double().mean(dim=-1).mean().item()}

    def in_parts(make: Callable[[Network, Tensor], Tensor]) -> Tensor:
        """Of 100 sequences at a time; the first axis is for lengths."""
        return torch.cat([make(network, part) for part in inputs.split(100)], dim=1)

    yield {"mode": "whole"} | score(network(inputs))
    network = network.double()
    terms = in_parts(frozen_terms)
    error = (terms.sum(dim=0) - network.encoder(network.embed(inputs))).abs().max()
    yield {"part": "check", "mode": "frozen", "value": float(error)}
    for reading, length in product(READINGS, range(len(terms) - 1)):
        row = {"mode": "frozen", "reading": reading, "length": length}
        yield row | score(network.head(read(terms, reading, length)))
    network = network.float()
    generator = torch.Generator().manual_seed(seed)
    for length, total in enumerate(in_parts(recomputed_sums)):
        row = {"mode": RECOMPUTED, "length": length}
        yield row | {"reading": "alone"} | score(network.head(plain_norm(total)))
        drawn = [sampled_sum(network, inputs, length, config.sampled, generator) for _ in range(config.repeats)]
        found = pd.Series([score(network.head(plain_norm(one)))["value"] for one in drawn])
        yield row | {"reading": "sampled", "value": found.mean(), "error": found.std()}


def read(terms: Tensor, reading: str, asked: int) -> Tensor:
    """The part of the frozen terms (L + 2, …) that a reading gives to the readout: (batch, n, d)."""
    keeps, constant = READINGS[reading]
    return terms[torch.tensor([*(keeps(length, asked) for length in range(len(terms) - 1)), constant])].sum(dim=0)


def draw(frame: pd.DataFrame) -> Any:
    """Accuracy by length of path, a panel per task."""
    tasks = list(frame["task"].unique())
    figure, axes = drawing.panels(len(tasks), width=4.1, height=3.6)
    for ax, task in zip(axes, tasks, strict=True):
        found = rows(frame, part="accuracy", task=task)
        for (mode, reading), (colour, dashes, name) in _CURVES.items():
            own = rows(found, mode=mode, reading=reading).groupby("length")["value"]
            range_line(ax, own, colour, name, linestyle=dashes, marker="o", markersize=3)
        for (mode, reading), (colour, dashes, name) in _LEVELS.items():
            level = rows(found, mode=mode, reading=reading)["value"].mean()
            ax.axhline(level, color=colour, linestyle=dashes, linewidth=1, label=name)
        axis(ax, task.capitalize(), "length of paths", "accuracy", ylim=(0, 1.02))
        drawing.legend_below(ax, columns=2)
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
    depth = config.recipes[task].depth
    half = depth // 2

    def levels(mode: str, reading: str) -> pd.DataFrame:
        """Accuracy by length (rows) and seed (columns)."""
        chosen = rows(found, part="accuracy", mode=mode, reading=reading)
        return chosen.pivot(index="length", columns="seed", values="value")

    whole, alone = (rows(found, part="accuracy", mode=mode)["value"].mean() for mode in ("whole", "token alone"))
    frozen, constant, up_to = (levels("frozen", reading) for reading in READINGS)
    recomputed, sampled = (levels(RECOMPUTED, reading) for reading in ("alone", "sampled"))
    learnt = whole > alone + NEAR
    reached = (up_to.loc[half].mean() - alone) / (whole - alone) if learnt else math.nan
    spread = curve(found, "error", by="length", mode=RECOMPUTED, reading="sampled").max()
    lacks = "" if learnt else "the network has not learnt more than a token knows of itself"
    caption = "Fig. 4: “performance can be seen to consistently deteriorate with respect to path length”"
    falling = f"no rise of more than {RISE} from one length to the next, mean over seeds, and the last below the first"
    return [
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


SMALL: dict[str, Any] = {"depth": 3, "heads": 2, "width": 16, "rate": 5e-3}
BRIEF = {
    "sorting": Recipe(64, 32, 16, 4, epochs=12, batch=16, paper_rate=1e-5, classes=4, positions=True, **SMALL),
    "convex hull": Recipe(64, 16, 16, 6, epochs=3, batch=16, paper_rate=1e-5, **SMALL),
    "memorisation": Recipe(12, 0, 6, 8, epochs=5, batch=4, paper_rate=5e-3, ffn=True, **SMALL),
}
STUDY = Study("dong2021-paths", Config(), Config(BRIEF, repeats=3, trials=2), compute, draw, claims, in_folder=True)
