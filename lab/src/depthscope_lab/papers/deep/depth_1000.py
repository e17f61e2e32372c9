"""A thousand post-norm blocks on digits: the prescription of `theory.prescribe`, and what does as well without it.

Ours. Every variant gets the best of the same learning rates, chosen on images that are not the test images; then fresh
seeds. At 1000 blocks all variants come first, so that a study that was stopped has something to say.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope.theory import Prescription
from depthscope_lab.papers.deep.depth_1000_claims import claims
from depthscope_lab.papers.deep.depth_1000_runs import Run, Shape, found_or_trained, groups_of
from depthscope_lab.papers.deep.variants import LABELS, prescription, same_as
from depthscope_lab.papers.study import Study, Work, rows
from depthscope_lab.papers.trained import chosen_rates

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TUNING_SEED = 0  # added to the study's own; the runs that count have the seeds after it
COLUMNS = ["variant", "depth", "rate", "seed", "counts", "quantity", "step", "block", "value"]


@dataclass(frozen=True)
class Config:
    form: str = "full"
    depth: int = 1000
    others: tuple[int, ...] = (200, 50, 100, 500)  # other depths, in this order
    variants: tuple[str, ...] = tuple(LABELS)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    more: int = 2  # rates beyond these, at most, where the best is at their edge
    trials: int = 3  # seeds at `depth`
    trials_elsewhere: int = 1  # at the other depths
    shape: Shape = field(default_factory=Shape)
    seed: int = 0


def runs_of(config: Config) -> int:
    """How many runs of one block there are, at most: the measure of progress."""
    rates = len(config.rates) + config.more
    each = rates + config.trials, rates + config.trials_elsewhere
    return len(config.variants) * (config.depth * each[0] + sum(config.others) * each[1])


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """Trains what is not there yet in `folder`; one row per number.

    Quantities: train_loss (step), loss and accuracy at the end, t_sim and roles (step, block), without (block): what
    the loss rises by if these blocks are left out. `block` is the last one of a run of neighbours.
    """
    work = Work(runs_of(config), progress)
    found_rows: list[dict[str, Any]] = []

    def loss_of(variant: str, run: Run) -> float:
        """On the images that the run is judged on; infinite if it failed."""
        told = work.part(run.depth)
        found = found_or_trained(run, config.shape, folder / config.form, told)
        told(1.0)  # also where it was read, or broke off
        found_rows.extend(row | {"variant": variant} for row in rows_of(found))
        return math.inf if found["loss"] is None else float(found["loss"])

    stages = [(config.depth, config.trials), *((other, config.trials_elsewhere) for other in config.others)]
    for depth, trials in stages:
        own = {variant: same_as(variant, prescription_at(config, depth)) for variant in config.variants}

        def at_rate(variant: str, rate: float, depth: int = depth, own: dict[str, str] = own) -> float:
            return loss_of(variant, Run(own[variant], depth, rate, config.seed + TUNING_SEED, counts=False))

        def unasked(runs: int, depth: int = depth) -> None:
            work(runs * depth)

        chosen = chosen_rates(config.variants, config.rates, config.more, at_rate, unasked)
        for seed in range(config.seed + TUNING_SEED + 1, config.seed + TUNING_SEED + 1 + trials):
            for variant, rate in chosen.items():
                loss_of(variant, Run(own[variant], depth, rate, seed, counts=True))
    return pd.DataFrame(found_rows, columns=COLUMNS)


def prescription_at(config: Config, depth: int) -> Prescription:
    """What the theory prescribes for the blocks of this study."""
    shape = config.shape
    return prescription(depth, shape.width, shape.ffn_width, shape.tokens)


def rows_of(found: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row per number of a run; a number that is not finite is nan."""
    about = found["run"]
    last = [group.stop for group in groups_of(about["depth"])]

    def row(quantity: str, value: float | None, step: int = 0, block: int = 0) -> dict[str, Any]:
        number = float("nan") if value is None else value
        return {**about, "quantity": quantity, "step": step, "block": block, "value": number}

    yield from (row("train_loss", value, step) for step, value in enumerate(found["losses"], start=1))
    yield row("loss", found["loss"])
    yield row("accuracy", found["accuracy"])
    for look in found["looks"]:
        for quantity, name in (("t_sim", "similarity"), ("roles", "roles")):
            pairs = zip(last, look[name], strict=False)
            yield from (row(quantity, value, look["step"] + 1, block) for block, value in pairs)
    if found["without"]:
        whole = found["without"]["whole"]
        for block, value in zip(last, found["without"]["losses"], strict=True):
            yield row("without", None if value is None or whole is None else value - whole, 0, block)


def draw(frame: pd.DataFrame) -> Figure:
    counted = rows(frame, counts=True)
    if counted.empty:
        return drawing.empty("nothing is trained yet")
    deepest = rows(counted, depth=counted["depth"].max())
    figure, axes = drawing.panels(3, 2)
    colours = dict(zip(LABELS, drawing.PALETTE, strict=False))
    for variant, label in LABELS.items():
        look = {"colour": colours[variant], "name": label}
        own = rows(deepest, variant=variant)
        _line(axes[0], rows(own, quantity="train_loss"), "step", **look)
        _line(axes[1], rows(counted, variant=variant, quantity="loss"), "depth", marker="o", **look)
        roles = rows(own, quantity="roles")
        _line(axes[2], rows(roles, step=roles["step"].max()), "block", **look)
        _line(axes[5], rows(own, quantity="without"), "block", **look)
    axes[1].set_xscale("log")
    axes[2].set_yscale("log")
    axes[5].set_yscale("symlog", linthresh=1e-3)
    blocks = deepest["depth"].max()
    drawing.label(axes[0], f"training, {blocks} blocks", "step", "loss")
    drawing.label(axes[1], "depth against loss", "blocks", "test loss")
    drawing.label(axes[2], "can attention learn? (last step)", "block", "‖∂W_Q,K‖ / ‖∂W_V,O‖")
    drawing.label(axes[5], "blocks left out", "block", "rise of the test loss")
    for ax, variant in ((axes[3], "alpha"), (axes[4], "prescribed")):
        own = rows(deepest, variant=variant, quantity="t_sim")
        table = own.pivot_table(index="step", columns="block", values="value")
        for step, values in table.iterrows():
            ax.plot(values.index, values, label=f"step {step}")
        drawing.similarity_axis(ax)
        drawing.label(ax, f"t_sim, {LABELS[variant]}", "block", "t_sim behind the FFN")
        if len(table):
            drawing.legend_inside(ax)
    drawing.shared_legend(figure, axes[0], columns=4)
    return figure


def _line(ax: Any, chosen: pd.DataFrame, x: str, *, colour: str, name: str, marker: str = "") -> None:
    """The mean over seeds, and the range between the least and the greatest."""
    if chosen.empty:
        return
    values = chosen.groupby(x)["value"]
    ax.plot(values.mean().index, values.mean(), color=colour, label=name, marker=marker, markersize=3)
    drawing.band(ax, values.mean().index, values.min(), values.max(), colour=colour)


STUDY = Study(
    name="depth-1000",
    full=Config(),
    quick=Config(
        form="quick",
        depth=60,
        others=(),
        variants=("prescribed", "alpha"),
        rates=(3e-4, 1e-3),
        more=0,
        trials=1,
        shape=Shape(width=16, ffn_width=16, heads=2, patch_size=4, batch=8, steps=4, left_out_on=8),
    ),
    compute=compute,
    draw=draw,
    claims=claims,
    in_folder=True,
)
