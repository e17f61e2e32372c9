"""Which number speaks first before a training collapses?

A post-norm ViT of 24 blocks on scikit-learn's digits, whose learning rate rises evenly to one that is too large, and
to one that is not. Three signals of every step, from `watch(gradients=True)`: t_sim behind the last block, the mean-
coherent share of the gradient of what writes into the trunk (after MV-Split, arXiv 2605.06169, which sees it rise
before a deep diffusion Transformer collapses), and ‖∂W_Q,K‖/‖∂W_V,O‖; the latter two as medians over blocks and
writers. A signal *speaks* at the first of `LOOKS` steps in a row at which it lies outside all that it did in the
healthy runs of the other seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pandas as pd
import torch

from depthscope import drawing
from depthscope.measures import EQUAL
from depthscope.probing.roles import COHERENT, MEASURES
from depthscope.progress import Share, Tick
from depthscope.watching import watch
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.trained import loss_of_task, steps
from depthscope_lab.papers.vocabulary import Claim, Work, axis, judge, line, rows
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.recipes import RECIPES

SIGNALS = {"t_sim": "t_sim, last block", "share": "mean-coherent share, median", "ratio": "Q, K over V, O, median"}
COLOURS = {"too large": drawing.VERMILION, "healthy": drawing.BLUE}
LOOKS = 3  # in a row, so that one step alone says nothing
ENOUGH = 30  # steps below which nothing is judged


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 3
    depth: int = 24
    width: int = 64
    steps: int = 80
    too_large: float = 1e-2  # where the rate arrives at the last step, from 0
    healthy: float = 2e-4


def compute(config: Config, progress: Share) -> pd.DataFrame:
    """Tidy rows: rate (too large, healthy), seed, step, signal (also the loss), value."""
    advance = Work(2 * config.trials * config.steps, progress)
    frames = [
        _run(config, rate, config.seed + trial, advance).assign(rate=name, seed=config.seed + trial)
        for trial in range(config.trials)
        for name, rate in (("too large", config.too_large), ("healthy", config.healthy))
    ]
    return pd.concat(frames, ignore_index=True)


def _run(config: Config, rate: float, seed: int, advance: Tick) -> pd.DataFrame:
    settings = RECIPES["vit-digits"]("post").changed(
        depth=config.depth, width=config.width, ffn_width=2 * config.width, heads=4, batch_size=64, seed=seed
    )
    task = ImageClassification(settings, load_digits())  # type: ignore[arg-type]
    model = task.build().train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    losses = []
    with watch(model, every=1, measures=["token_similarity"], gradients=True) as watched:
        rising = lambda step: rate * (step + 1) / config.steps  # noqa: E731
        for _, loss in steps(partial(loss_of_task, task, model), optimiser, config.steps, rate=rising):
            losses.append(loss)
            advance()
    told = pd.DataFrame({"step": range(config.steps), "signal": "loss", "value": losses})
    return pd.concat([signals(watched.records), told], ignore_index=True)


def signals(records: pd.DataFrame) -> pd.DataFrame:
    """step, signal, value: the three numbers of every watched step."""
    t_sim = rows(records, measure="token_similarity", block=records["block"].max())
    share = rows(records, measure=COHERENT).groupby("step")["value"].median()
    score, value = (
        rows(records, measure=MEASURES[role]).set_index(["step", "block"])["value"]
        for role in ("queries_keys", "values_output")
    )
    ratio = (score / value).groupby("step").median()
    found = {"t_sim": t_sim.groupby("step")["value"].first(), "share": share, "ratio": ratio}
    return pd.concat(
        [values.rename("value").reset_index().assign(signal=name) for name, values in found.items()], ignore_index=True
    )


def curve(frame: pd.DataFrame, rate: str, seed: int, signal: str) -> pd.Series:
    """A signal over the steps of one run."""
    return rows(frame, rate=rate, seed=seed, signal=signal).set_index("step")["value"].sort_index()


def first_in_a_row(holds: pd.Series, looks: int = LOOKS) -> int | None:
    """The first step of `looks` in a row at which it holds."""
    long_enough = holds.astype(float).rolling(looks).sum() == looks
    ends = [int(step) for step, enough in long_enough.items() if enough]  # type: ignore[call-overload]
    return ends[0] - looks + 1 if ends else None


def speaks(frame: pd.DataFrame, rate: str, seed: int, signal: str) -> int | None:
    """When a run leaves what the healthy runs of the other seeds did: above it, or below it for the ratio."""
    others = frame[(frame["rate"] == "healthy") & (frame["seed"] != seed) & (frame["signal"] == signal)]["value"]
    own = curve(frame, rate, seed, signal)
    return first_in_a_row(own < others.min() if signal == "ratio" else own > others.max())


def collapses(frame: pd.DataFrame, rate: str, seed: int) -> int | None:
    """From which step on the tokens behind the last block are equal until the end."""
    equal = curve(frame, rate, seed, "t_sim") >= EQUAL
    if not bool(equal.iloc[-1]):
        return None
    return int(equal.index[~equal].max()) + 1 if not equal.all() else int(equal.index[0])


def draw(frame: pd.DataFrame) -> Any:
    figure, axes = drawing.panels(4, 1, width=3.6, height=3.0)
    for ax, (signal, title) in zip(axes, {"loss": "training loss", **SIGNALS}.items(), strict=True):
        for rate, seed in product(sorted(COLOURS), sorted(frame["seed"].unique())):
            line(ax, curve(frame, rate, seed, signal), COLOURS[rate], rate, linewidth=1.1)
        axis(ax, title, "step", "", log=signal == "ratio")
    handles = dict(zip(*reversed(axes[0].get_legend_handles_labels()), strict=True))
    axes[0].legend(handles.values(), handles.keys(), frameon=False)
    return figure


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    seeds = sorted(int(seed) for seed in frame["seed"].unique())
    lacks = "" if config.steps >= ENOUGH and len(seeds) > 1 else f"needs {ENOUGH} steps and two seeds"
    ends = {seed: collapses(frame, "too large", seed) for seed in seeds}
    healthy = [curve(frame, "healthy", seed, "t_sim").iloc[-1] for seed in seeds]
    false = {name: [s for s in seeds if speaks(frame, "healthy", s, name) is not None] for name in SIGNALS}
    return [
        judge(
            "at a learning rate that is too large the tokens of a post-norm ViT become equal in training",
            "ours",
            f"rate {config.too_large:g}: t_sim of the last block is {EQUAL:g} or more from step "
            f"{_steps(ends)} on; rate {config.healthy:g}: it ends at {', '.join(f'{value:.2f}' for value in healthy)}",
            f"in every seed; below {EQUAL:g} at the end of every healthy run",
            all(step is not None for step in ends.values()) and max(healthy) < EQUAL,
            lacks=lacks,
        ),
        *(_leads(frame, signal, ends, lacks) for signal in SIGNALS),
        judge(
            "no signal speaks in a healthy run, judged by the healthy runs of the other seeds",
            "ours: a signal that always speaks leads by any number of steps",
            ", ".join(f"{name}: {len(found)} of {len(seeds)}" for name, found in false.items()),
            "none",
            not any(false.values()),
            lacks=lacks,
        ),
    ]


def _leads(frame: pd.DataFrame, signal: str, ends: dict[int, int | None], lacks: str) -> Claim:
    spoken = {seed: speaks(frame, "too large", seed, signal) for seed in ends}
    pairs = [(spoken[seed], end) for seed, end in ends.items()]
    leads = [end - first for first, end in pairs if end is not None and first is not None]
    return judge(
        f"{SIGNALS[signal]}: speaks before the collapse",
        "MV-Split (2605.06169): the share spikes before the collapse" if signal == "share" else "ours",
        f"steps before t_sim stays at {EQUAL:g}: {', '.join(f'{lead:+d}' for lead in leads) or 'none'} (speaks at step "
        f"{_steps(spoken)})",
        f"{LOOKS} steps before it at least, in every seed: as many as it takes to be sure of it",
        len(leads) == len(ends) and min(leads) >= LOOKS,
        lacks=lacks,
    )


def _steps(found: dict[int, int | None]) -> str:
    return ", ".join("never" if step is None else str(step) for step in found.values())


STUDY = Study("leading-signal", Config(), Config(trials=2, depth=3, width=16, steps=6), compute, draw, claims)
