"""Training runs side by side: a row per depth, a column per quantity, bands over the seeds."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from depthscope.drawing.palette import BLACK, PURPLE, SKY, VARIANT_COLOURS
from depthscope.drawing.panels import label, legend_inside, line_with_band, panels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
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
    figure, axes = panels(len(quantities), len(depths), width=3.5, height=3.0)
    last = frame["step"].max()
    for row, depth in enumerate(depths):
        for column, quantity in enumerate(quantities):
            ax = axes[row * len(quantities) + column]
            _draw(ax, frame[(frame["depth"] == depth) & (frame["quantity"] == quantity)], labels)
            ax.set_xlim(0, 1.03 * last)
            label(ax, f"{depth} blocks", "step", TITLES.get(quantity, quantity.replace("_", " ")))
    for ax in axes[:: len(quantities)]:
        legend_inside(ax)
    return figure


def _draw(ax: Axes, frame: pd.DataFrame, labels: Mapping[str, str]) -> None:
    others = [variant for variant in frame["variant"].unique() if variant not in VARIANT_COLOURS]
    colours = VARIANT_COLOURS | dict(zip(others, OTHER_COLOURS * len(others), strict=False))
    for variant, of_variant in frame.groupby("variant", sort=False):
        groups = of_variant.groupby(["warmup_steps", "lr"], sort=True)
        for number, ((warmup, lr), runs) in enumerate(groups):
            parts = [labels.get(str(variant), str(variant))]
            if of_variant["lr"].nunique() > 1:
                parts.append(f"lr {lr:g}")
            if frame["warmup_steps"].nunique() > 1:
                parts.append(f"warm-up {warmup}")
            by_step = runs.groupby("step")["value"]
            if len(by_step) == 1 and runs["seed"].nunique() > 1:  # a band has no width there
                ax.errorbar(by_step.mean().index, by_step.mean(), by_step.std(), color=colours[str(variant)], capsize=3)
            line_with_band(
                ax,
                by_step.mean().index,
                by_step.mean(),
                by_step.std() if runs["seed"].nunique() > 1 else None,
                colour=colours[str(variant)],
                name=", ".join(parts),
                linestyle=_LINES[number % len(_LINES)],
                marker="o" if len(by_step) < FEW else None,
                markersize=4,
            )
