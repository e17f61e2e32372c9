"""Which remedy when: published wirings and remedies, trained at 12, 48 and 100 blocks under the fair protocol.

Vision Transformers of width 32 on scikit-learn's digits. At each depth every variant has the learning rate that suits
it, of a grid that is the same for all and is judged on validation data, and three fresh seeds that are judged on test
data (`depthscope compare --tune`). Steps, batch and data are the same for all variants of a depth. Patches of 4 × 4
make five tokens of an image, with the class token: with 17 tokens, runs of this length learn next to nothing. Each
statement and its tolerance were fixed before the first result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope.report.formats import WATCHED
from depthscope_lab.papers.fair import measured, ranked, train_fairly, with_bounds
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, Work, axis, curve, judge, rows
from depthscope_lab.training.comparison import Launch
from depthscope_lab.training.protocol import Protocol
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.variants import label_of, variant_of

# peri is left out: here it is sandwich but for one norm.
WIRINGS = (
    *("post", "pre", "sandwich", "res-post", "rezero", "layer-scale", "sqrt-depth", "ln-scaling", "deep-norm", "admin"),
    *("keel", "b2t", "resi-dual", "mix-ln", "hybrid-norm"),
)
IN_POST = ("deescalated", "deescalated(tau=0.5)", "residual-weight", "mv-split", "contra-norm", "pair-norm")
ALL = (*WIRINGS, *IN_POST)
LABELS = {variant: label_of(variant) for variant in ALL}
CHANCE = math.log(10)  # the loss of equal odds for ten classes
TRAINS, AT_CHANCE = 0.9 * CHANCE, 0.97 * CHANCE  # at most, in every seed; at least, in the mean
PREDICTS = 0.5  # of Spearman's rank correlation, at least
INITIAL = "token_similarity_at_initialisation"
KINDS = {"plain": drawing.VERMILION, "wirings": drawing.BLUE, "remedies in post-norm": drawing.GREEN}


@dataclass(frozen=True)
class Stage:
    """What is trained at a depth. `lr` is the middle of the grid: a third, once, three times."""

    depth: int
    steps: int
    lr: float
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Config:
    form: Literal["full", "quick"] = "full"
    stages: tuple[Stage, ...] = (Stage(12, 100, 3e-3, ALL), Stage(48, 80, 1.5e-3, ALL), Stage(100, 80, 1.5e-3, ALL))
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {"width": 32, "ffn_width": 64, "heads": 4, "patch_size": 4, "batch_size": 32}
    )
    more: int = 2  # rates beyond the grid
    trials: int = 3  # fresh seeds, at least 3
    seed: int = 0  # the seeds that are judged follow it; rates are chosen with seed 0


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """The table of `papers.fair`; t_sim at initialisation (last block, after its FFN) is a quantity of its own."""
    frames = []
    cost = [stage.depth * stage.steps * len(stage.variants) for stage in config.stages]
    work = Work(sum(cost), progress)
    seeds = tuple(range(config.seed + 1, config.seed + 1 + config.trials))
    for size, stage in zip(cost, config.stages, strict=True):
        shape = {"depth": stage.depth, "lr": stage.lr, **config.settings}
        configs = [RECIPES["vit-digits"](variant).changed(**shape) for variant in stage.variants]
        rare = dict.fromkeys(("evaluate_every", "checkpoint_every", "watch_every"), stage.steps)  # at 0, at the end
        options = {"tracker": "none", "draw": False, **rare}
        launch = Launch(folder / f"{config.form}-{stage.depth}", in_process=True, options=options)
        protocol = Protocol(stage.steps, more=config.more, seeds=seeds)
        frames.append(train_fairly(configs, protocol, launch, work.part(size)))
    frame = pd.concat(frames, ignore_index=True)
    frame.loc[(frame["quantity"] == WATCHED) & (frame["step"] == 0), "quantity"] = INITIAL
    return frame


def draw(frame: pd.DataFrame) -> Any:
    """Above: the test loss of every seed, best variant on top. Below: t_sim at initialisation against it."""
    runs = measured(frame)
    depths = sorted(runs["depth"].unique())
    figure, axes = drawing.panels(len(depths), 2, width=4.4, height=4.6)
    for depth, above, below in zip(depths, axes, axes[len(depths) :], strict=False):
        losses = rows(runs, depth=depth, quantity="test_loss")
        means, alike = curve(losses, by="variant"), curve(runs, by="variant", depth=depth, quantity=INITIAL)
        means = means.sort_values(ascending=False)
        for place, (variant, mean) in enumerate(means.items()):
            values, colour = rows(losses, variant=variant)["value"], KINDS[_kind(str(variant))]
            above.plot(values, [place] * len(values), "|", color=colour, markersize=7)
            above.plot([values.min(), values.max()], [place, place], color=colour, linewidth=1.2)
            above.plot([mean], [place], "o", color=colour, markersize=4)
        above.set_yticks(range(len(means)), [LABELS[str(name)] for name in means.index])
        axis(above, f"{depth} blocks", "test loss: mean and three seeds", "")
        for kind, colour in KINDS.items():
            own = [name for name in means.index if _kind(str(name)) == kind]
            below.plot(alike.reindex(own), means.reindex(own), "o", color=colour, markersize=4, label=kind)
        axis(below, "", "t_sim at initialisation, last block", "test loss, mean over seeds")
        drawing.legend_inside(below)
    return figure


def _kind(variant: str) -> str:
    return "plain" if variant in ("post", "pre") else "wirings" if variant in WIRINGS else "remedies in post-norm"


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    """A verdict on each; the quick form, whose few steps tell no variant from another, judges nothing."""
    found, few = ranked(frame), config.form == "quick"
    depths = sorted(set(frame["depth"]))
    shallow, middle, deep = depths[0], depths[len(depths) // 2], depths[-1]
    at = {depth: {row["variant"]: row for row in found if row["depth"] == depth} for depth in depths}
    ours, post, end_pre = at[deep]["deescalated"], at[middle]["post"], at[shallow]["pre"]
    low, least = end_pre.get("test_loss_low"), post.get("test_loss_low")
    better = sorted((row for row in at[shallow].values() if low is not None and _high(row) < low), key=_loss)
    others = [row for name, row in at[middle].items() if variant_of(name).remedies]
    help_it = sorted((row for row in others if _high(row) < (math.inf if least is None else least)), key=_loss)
    stages = "; ".join(f"{s.depth} blocks: {len(s.variants)} variants, {s.steps} steps" for s in config.stages)
    edges = ", ".join(f"{row['variant']} at {row['depth']} ({row['edge']})" for row in found if row["edge"])
    note = f"{stages}; {config.trials} fresh seeds; rates at the edge of those tried: {edges or 'none'}"

    def said(claim: str, ours: str, tolerance: str, holds: bool | None) -> Claim:
        return judge(claim, "ours", ours, tolerance, holds, note + "; too few steps for a verdict" * few, when=not few)

    def predicts(depth: int) -> Claim:
        initial = curve(measured(frame), by="variant", quantity=INITIAL, depth=depth)
        losses = [min(_loss(row), CHANCE) for row in at[depth].values()]
        correlation = rank_correlation([initial[name] for name in at[depth]], losses)
        return said(
            f"at {depth} blocks t_sim at initialisation predicts which variants train",
            f"Spearman's correlation of t_sim after the last FFN and test loss: {correlation:.2f}, {len(losses)} "
            "variants",
            f"at least {PREDICTS:g}; a variant that failed or is above chance counts as at chance",
            None if math.isnan(correlation) else correlation >= PREDICTS,
        )

    return [
        said(
            f"at {deep} blocks the de-escalated post-norm model trains where plain post-norm stays at chance",
            f"test loss: de-escalated {with_bounds(ours)}, post-norm {with_bounds(at[deep]['post'])}",
            f"de-escalated at most 0.9 ln 10 = {TRAINS:.3f} in every seed; post-norm's mean at least 0.97 ln 10 = "
            f"{AT_CHANCE:.3f}, or a run of it failed",
            _high(ours) <= TRAINS and _loss(at[deep]["post"]) >= AT_CHANCE,
        ),
        said(
            f"at {shallow} blocks no remedy beats pre-norm with a tuned rate",
            f"pre-norm {with_bounds(end_pre)}; below its interval: "
            + (", ".join(f"{row['variant']} {with_bounds(row)}" for row in better) or "none"),
            "no other interval lies wholly below that of pre-norm",
            None if low is None else not better,
        ),
        said(
            f"at {middle} blocks most remedies make a post-norm model better",
            f"{len(help_it)} of {len(others)}: {', '.join(row['variant'] for row in help_it) or 'none'}",
            "more than half of them have an interval wholly below that of plain post-norm",
            2 * len(help_it) > len(others),
        ),
        *map(predicts, sorted({middle, deep})),
    ]


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Spearman's: the correlation of the ranks, equal values sharing their mean rank; nan where all are equal."""
    ranks = pd.DataFrame({"one": one, "other": other}).rank()
    return float(ranks["one"].corr(ranks["other"]))


def _loss(row: Mapping[str, Any]) -> float:
    """The mean over the seeds; infinite if all failed."""
    return math.inf if row.get("test_loss") is None else float(row["test_loss"])


def _high(row: Mapping[str, Any]) -> float:
    """The upper end of the interval; infinite where a run failed, so that it lies below nothing."""
    return math.inf if row.get("test_loss_high") is None else float(row["test_loss_high"])


TINY = {"width": 8, "ffn_width": 8, "heads": 2, "patch_size": 4, "batch_size": 8}
QUICK = Config("quick", (Stage(2, 3, 1e-3, ("post", "pre", "deescalated")),), TINY, more=0)
STUDY = Study("remedies", Config(), QUICK, compute, draw, claims, in_folder=True)
