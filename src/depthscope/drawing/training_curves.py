"""Training runs side by side: a row per depth, a column per quantity, bands over the seeds."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING

from depthscope.drawing.palette import BLACK, PURPLE, SKY, VARIANT_COLOURS
from depthscope.drawing.panels import label, legend_inside, line_with_band, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

OTHER_COLOURS = (PURPLE, SKY, BLACK)
TITLES = {
    "loss": "training loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "valid_loss": "validation loss",
    "valid_loss_future_hidden": "validation loss, future hidden",
    "token_similarity": "t_sim, last block",
}
FEW = 10  # points that are marked: a single one has no line
_LINES = ("-", "--", ":", "-.")


def draw_training_curves(frame: pd.DataFrame, labels: Mapping[str, str] = MappingProxyType({})) -> Figure:
    """`frame` has the columns variant, depth, lr, warmup_steps, seed, step, quantity, value, a row per number.

    Line: mean over seeds; band, or bar where there is one step only: ± one standard deviation. A column of panels per
    quantity that was measured; line styles are warm-ups and learning rates, if they vary. `labels`: what variants are
    called, if not by their names.
    """
    depths = sorted(frame["depth"].unique())
    measured = list(frame["quantity"].unique())
    quantities = [*(name for name in TITLES if name in measured), *(name for name in measured if name not in TITLES)]
    others = [variant for variant in frame["variant"].unique() if variant not in VARIANT_COLOURS]
    colours = VARIANT_COLOURS | dict(zip(others, OTHER_COLOURS * len(others), strict=False))
    figure, axes = panels(len(quantities), len(depths), width=3.5, height=3.0)
    for ax, (depth, quantity) in zip(axes, product(depths, quantities), strict=True):
        rows = frame[(frame["depth"] == depth) & (frame["quantity"] == quantity)]
        for variant, of_variant in rows.groupby("variant", sort=False):
            for number, ((warmup, lr), runs) in enumerate(of_variant.groupby(["warmup_steps", "lr"], sort=True)):
                parts = [labels.get(str(variant), str(variant))]
                parts += [f"lr {lr:g}"] if of_variant["lr"].nunique() > 1 else []
                parts += [f"warm-up {warmup}"] if rows["warmup_steps"].nunique() > 1 else []
                by_step, colour = runs.groupby("step")["value"], colours[str(variant)]
                mean, spread = by_step.mean(), by_step.std() if runs["seed"].nunique() > 1 else None
                if len(mean) == 1 and spread is not None:  # a band has no width there
                    ax.errorbar(mean.index, mean, spread, color=colour, capsize=3)
                style = {"linestyle": _LINES[number % len(_LINES)], "marker": "o" if len(mean) < FEW else None}
                line_with_band(
                    ax, mean.index, mean, spread, colour=colour, name=", ".join(parts), markersize=4, **style
                )
        ax.set_xlim(0, 1.03 * frame["step"].max())
        label(ax, f"{depth} blocks", "step", TITLES.get(quantity, quantity.replace("_", " ")))
    for ax in axes[:: len(quantities)]:
        legend_inside(ax)
    return figure
