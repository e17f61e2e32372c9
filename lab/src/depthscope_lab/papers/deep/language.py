"""100 causal post-norm blocks on letters: does the prescription (α, τ) make them train, and what else does?

The prescription of `theory.prescribe` is put into a classic post-norm model with the causal mean, and compared with
each of its halves, with the classic model, and with pre-norm, DeepNorm and LayerScale. Each has the best of the same
rates, chosen on text that is not the test text, and then fresh seeds. All see the same letters in the same steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from depthscope import drawing
from depthscope.progress import Share
from depthscope_lab.papers.deep.language_claims import claims
from depthscope_lab.papers.deep.language_runs import (
    ALPHA,
    DEEP_NORM,
    LAYER_SCALE,
    POST,
    PRE,
    PRESCRIBED,
    ROLES,
    SPARSE,
    TAU,
    UNTOLD,
    VARIANTS,
    Run,
    Training,
    found_or_trained,
    letter_frequencies,
)
from depthscope_lab.papers.study import Study, Work, rows
from depthscope_lab.papers.trained import chosen_rates
from depthscope_lab.training.data.characters import Characters, load_characters
from depthscope_lab.training.intervals import bootstrap_interval

TUNING_SEED = 1000  # added to the study's own: no seed that is judged has helped to choose
_COLOURS = {
    PRESCRIBED: drawing.GREEN,
    PRE: drawing.BLUE,
    POST: drawing.VERMILION,
    TAU: drawing.ORANGE,
    ALPHA: drawing.PURPLE,
    DEEP_NORM: drawing.BLACK,
    LAYER_SCALE: drawing.SKY,
    SPARSE: drawing.YELLOW,
    UNTOLD: drawing.GREY,
}
_SHORT = {SPARSE: "τ every 10th block", UNTOLD: "frequencies not told"}  # where there is little room


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 3
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3)
    more: int = 2  # rates beyond these, at most, where the best is at their edge
    variants: tuple[str, ...] = VARIANTS
    training: Training = field(default_factory=Training)


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """Trains what is not there yet in `folder`. Tidy rows: variant, rate, seed, held_out, step, block, quantity, value.

    What a run has: `language_runs.trained`. held_out is "validation" for the runs that choose a rate. Besides, with
    the seed −1: `low` and `high`, the interval of a variant's test loss; with seeds: `learns` by look and block, the
    gradient of queries and keys over that of values and output. `floor`: the test loss of one who knows only how
    frequent letters are.
    """
    data, each = load_characters(), len(config.rates) + config.more + config.trials
    work = Work(each * len(config.variants), progress)
    frames: list[pd.DataFrame] = []

    def run(variant: str, rate: float, seed: int, held_out: str) -> pd.DataFrame:
        frames.append(found_or_trained(Run(variant, rate, seed, held_out), config.training, data, folder, work.part()))
        return frames[-1]

    def loss_at(variant: str, rate: float) -> float:
        return held_out_loss(run(variant, rate, config.seed + TUNING_SEED, "validation"))

    chosen = chosen_rates(config.variants, config.rates, config.more, loss_at, work)
    for trial in range(config.trials):  # outermost: what is interrupted has whole seeds to compare
        for variant, rate in chosen.items():
            run(variant, rate, config.seed + trial, "test")
    frame = pd.concat(frames, ignore_index=True)
    return pd.concat([frame, _learns(frame), _intervals(frame), _floor(data)], ignore_index=True)


def held_out_loss(found: pd.DataFrame) -> float:
    """At the end of a run; infinite if it failed."""
    value = float(rows(found, quantity="held_out")["value"].iloc[0])
    return math.inf if math.isnan(value) else value


def _learns(frame: pd.DataFrame) -> pd.DataFrame:
    """‖∂W_Q,K‖/‖∂W_V,O‖ by run, step and block; nan where nothing has a gradient."""
    keys = ["variant", "rate", "seed", "held_out", "step", "block"]
    above, below = (rows(frame, quantity=role).set_index(keys)["value"] for role in ROLES.values())
    return (above / below).rename("value").reset_index().assign(quantity="learns")


def _intervals(frame: pd.DataFrame) -> pd.DataFrame:
    judged = rows(frame, held_out="test", quantity="held_out")
    found = []
    for (variant, rate), values in judged.groupby(["variant", "rate"], sort=False)["value"]:
        low, high = bootstrap_interval(values.tolist()) or (np.nan, np.nan)
        about = {"variant": variant, "rate": rate}
        found += [{**about, "quantity": "low", "value": low}, {**about, "quantity": "high", "value": high}]
    return pd.DataFrame(found).assign(seed=-1, held_out="test", step=-1, block=-1)


def _floor(data: Characters) -> pd.DataFrame:
    """Nats per letter of the test text."""
    loss = -letter_frequencies(data)[data.test].mean().item()
    row = {"variant": "letter frequencies", "rate": np.nan, "seed": -1, "held_out": "test", "step": -1, "block": -1}
    return pd.DataFrame([{**row, "quantity": "floor", "value": loss}])


def draw(frame: pd.DataFrame) -> Any:
    """Above: training, test, gradients and blocks left out. Below: t_sim by block and step, one panel per variant."""
    judged = rows(frame, held_out="test")
    variants = [name for name in _COLOURS if name in set(frame["variant"])]
    figure, axes = drawing.panels(5, rows=3, width=3.3, height=3.0)
    training, test, learns, skipped, *maps = axes
    floor = rows(frame, quantity="floor")["value"].iloc[0]
    for name in variants:
        own, colour = rows(judged, variant=name), _COLOURS[name]
        _curve(training, own, "loss", "step", colour, name)
        last = rows(own, step=rows(own, quantity="learns")["step"].max())
        _curve(learns, last, "learns", "block", colour, name)
        _curve(skipped, own[own["block"] > 0], "skip", "block", colour, name)
    _draw_test(test, judged, variants)
    for ax in (training, test):
        line = ax.axhline if ax is training else ax.axvline
        line(floor, color=drawing.GREY, linewidth=1, linestyle=":")
    learns.set_yscale("log")
    skipped.set_yscale("symlog", linthresh=1e-3)
    drawing.label(training, "Training (dotted: letter frequencies)", "step", "loss, nats per letter")
    drawing.label(learns, "Gradient at the last look", "block", "queries and keys over values and output")
    drawing.label(skipped, "Which blocks matter", "block left out", "rise of the loss")
    for ax, name in zip(maps, variants, strict=False):
        _draw_similarity(figure, ax, rows(judged, variant=name), name)
    for ax in maps[len(variants) :]:
        ax.set_axis_off()
    drawing.shared_legend(figure, training, columns=4)
    return figure


def _curve(ax: Any, own: pd.DataFrame, quantity: str, along: str, colour: str, name: str) -> None:
    """Mean over seeds, and their range."""
    found = rows(own, quantity=quantity).groupby(along)["value"]
    centre = found.mean()
    ax.plot(centre.index, centre, color=colour, linewidth=1.3, label=name)
    drawing.band(ax, centre.index, found.min(), found.max(), colour=colour)


def _draw_test(ax: Any, judged: pd.DataFrame, variants: list[str]) -> None:
    labels = []
    for place, name in enumerate(variants):
        own = rows(judged, variant=name)
        values, low, high = (rows(own, quantity=quantity)["value"] for quantity in ("held_out", "low", "high"))
        ax.plot([low.iloc[0], high.iloc[0]], [place, place], color=_COLOURS[name], linewidth=2)
        ax.plot(values, [place] * len(values), "o", color=_COLOURS[name], markersize=4)
        labels.append(f"{_SHORT.get(name, name)}, {own['rate'].iloc[0]:g}")
    ax.set_yticks(range(len(variants)), labels)
    ax.invert_yaxis()
    drawing.label(ax, "Test text: seeds and intervals", "loss, nats per letter", "variant, learning rate")


def _draw_similarity(figure: Any, ax: Any, own: pd.DataFrame, name: str) -> None:
    table = rows(own, quantity="token_similarity").pivot_table(index="block", columns="step", values="value")
    colours = ax.pcolormesh(table.columns, table.index, table, vmin=0, vmax=1, cmap="viridis", rasterized=True)
    figure.colorbar(colours, ax=ax)
    ax.grid(False)
    drawing.label(ax, f"t_sim, {_SHORT.get(name, name)}", "step", "block")


STUDY = Study(
    "depth-language",
    full=Config(),
    quick=Config(
        trials=2,
        rates=(1e-3, 3e-3),
        more=0,
        variants=(PRESCRIBED, PRE, POST),
        training=Training(
            depth=3, width=16, heads=2, batch=4, context=8, steps=4, warm_up=1, look_every=2, windows=8, skip_windows=2
        ),
    ),
    compute=compute,
    draw=draw,
    claims=claims,
    in_folder=True,
)
