"""Yu & Zhang 2024, Fig. 6: post-norm, pre-norm and de-escalated Vision Transformers, trained.

The paper trains 80 blocks for 150 epochs on CIFAR-10 (`--scale paper`, which needs a GPU). The default is the same
comparison on scikit-learn's digits; with `--data` and a folder of CIFAR-10, 48 narrow blocks for 150 steps. In each
form every variant has the learning rate that suits it, chosen on validation data; fresh seeds are judged on test data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch

from depthscope import drawing
from depthscope.progress import Share
from depthscope.report.formats import COLUMNS
from depthscope_lab.papers.fair import measured, ranked, rates_in_words, train_fairly, with_bounds
from depthscope_lab.papers.study import Study
from depthscope_lab.papers.vocabulary import Claim, judge
from depthscope_lab.training.comparison import Launch
from depthscope_lab.training.comparison_results import final_values
from depthscope_lab.training.loading import make_task
from depthscope_lab.training.protocol import Protocol
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.task import total_steps
from depthscope_lab.training.variants import YU_ZHANG as VARIANTS
from depthscope_lab.training.variants import label_of

CHANCE = math.log(10)  # the loss of equal odds for ten classes
ALIKE = 0.8  # the share of the other's progress from which on two variants count as close
PAPER = "§3.3, Fig. 6: ViT of 80 blocks, CIFAR-10, 150 epochs"
LABELS = {variant: label_of(variant) for variant in VARIANTS}  # of the curves


@dataclass(frozen=True)
class Config:
    form: Literal["digits", "quick", "cifar10", "paper"] = "digits"
    recipe: str = "vit-digits"
    settings: Mapping[str, Any] = field(
        default_factory=lambda: {"width": 32, "ffn_width": 64, "patch_size": 4, "batch_size": 32}
    )
    steps: int | None = 100  # None: as the recipe has it
    lr: float = 3e-4  # the middle of the grid, the same for all
    more: int = 1  # rates beyond the grid
    data: str | None = None
    trials: int = 3  # fresh seeds, at least 3
    seed: int = 0  # the seeds that are judged follow it; rates are chosen with seed 0


def compute(config: Config, progress: Share, folder: Path) -> pd.DataFrame:
    """Trains what is not there yet in `folder`; the table of `training.comparison_results.curves`.

    Empty for the paper's scale without a GPU: it is weeks of one CPU.
    """
    if config.form == "paper" and not torch.cuda.is_available():
        progress(1.0)
        return pd.DataFrame(columns=COLUMNS)
    recipe = RECIPES[config.recipe]
    configs = [recipe(variant).changed(lr=config.lr, **config.settings) for variant in VARIANTS]
    steps = config.steps or total_steps(make_task(configs[0], empty=True), configs[0])
    seeds = tuple(range(config.seed + 1, config.seed + 1 + config.trials))
    protocol = Protocol(steps, more=config.more, seeds=seeds)
    often = {} if config.steps is None else {"evaluate_every": steps, "checkpoint_every": 100}
    options = {"tracker": "none", "draw": False, **often}
    launch = Launch(folder / config.form, config.data, in_process=True, options=options)
    return train_fairly(configs, protocol, launch, progress)


def draw(frame: pd.DataFrame) -> Any:
    if len(frame):
        runs = measured(frame)
        return drawing.draw_training_curves(runs[runs["quantity"] != "failed"], LABELS)
    return drawing.empty("not computed: the paper's scale needs a GPU")


TOLERANCES = {
    "the post-norm model fails or lags behind the de-escalated model": (
        f"progress (ln 10 − loss) at most {ALIKE:g} of the de-escalated, in training and in test loss"
    ),
    "the de-escalated model trains": (
        f"in every run: test loss at most 0.9 ln 10 = {0.9 * CHANCE:.2f}, accuracy at least 20 %"
    ),
    "the de-escalated model is close to the pre-norm model": (
        f"at least {ALIKE:g} of its progress in test loss; it may be better"
    ),
}


def claims(frame: pd.DataFrame, config: Config) -> list[Claim]:
    """Progress is ln 10 − loss: how far below equal odds a variant has come. A run that failed has come nowhere.

    The quick form shows its numbers and judges nothing: its few steps tell no variant from another.
    """
    if not len(frame):
        note = "the paper's scale needs a GPU; the same command computes it there"
        return [judge(claim, PAPER, "not computed", tolerance, None, note) for claim, tolerance in TOLERANCES.items()]
    table = ranked(frame)
    final = final_values(measured(frame)).reindex(columns=["variant", "loss", "test_loss", "test_accuracy"])
    progress = (CHANCE - final.set_index("variant")[["loss", "test_loss"]]).fillna(0.0).groupby("variant").mean()
    accuracy = final.groupby("variant")["test_accuracy"].mean()
    numbers = "; ".join(
        f"{LABELS[variant]} {CHANCE - progress['loss'][variant]:.3f}, {CHANCE - progress['test_loss'][variant]:.3f}, "
        f"{accuracy[variant]:.1%}"
        for variant in VARIANTS
    )
    post, pre, ours = (progress.loc[variant] for variant in VARIANTS)
    lag = {name: post[name] / ours[name] if ours[name] > 0 else math.inf for name in ("loss", "test_loss")}
    runs = final[final["variant"] == "deescalated"]
    worst_loss, worst_accuracy = runs["test_loss"].fillna(CHANCE).max(), runs["test_accuracy"].fillna(0).min()
    fails = "; it fails: test accuracy at most 15 %" if not accuracy["post"] > 0.15 else ""
    likeness = ours["test_loss"] / pre["test_loss"] if pre["test_loss"] > 0 else math.nan
    intervals = "; ".join(f"{LABELS[row['variant']]} {with_bounds(row)}, {row['rank'] or 'no rank'}" for row in table)
    settings = ", ".join(f"{name} {value}" for name, value in config.settings.items())
    note = (
        f"{config.recipe} with {settings or 'its own settings'}; {config.steps or 'all'} steps; {config.trials} fresh "
        f"seeds; learning rates chosen on validation data: {rates_in_words(table, LABELS)}"
    )
    quick = config.form == "quick"
    found = (
        (
            f"progress {lag['loss']:.2f} of the de-escalated in training, {lag['test_loss']:.2f} in test "
            f"loss{fails} (training loss, test loss, accuracy: {numbers})",
            max(lag.values()) <= ALIKE,
            note + ("; too few steps for a verdict" if quick else ""),
        ),
        (
            f"test loss {worst_loss:.3f} at most, accuracy {worst_accuracy:.1%} at least, in {len(runs)} run(s)",
            worst_loss <= 0.9 * CHANCE and worst_accuracy >= 0.2,
            "",
        ),
        (
            f"{likeness:.2f} of pre-norm's progress in test loss; test loss and its range over the seeds: {intervals}",
            likeness >= ALIKE,
            "",
        ),
    )
    return [
        judge(claim, PAPER, ours, tolerance, None if quick else holds, note)
        for (claim, tolerance), (ours, holds, note) in zip(TOLERANCES.items(), found, strict=True)
    ]


TINY = {"depth": 2, "width": 8, "ffn_width": 8, "heads": 2, "patch_size": 4, "batch_size": 16}
NARROW = {"depth": 48, "width": 64, "ffn_width": 128, "heads": 4, "patch_size": 16, "batch_size": 32, "augment": False}
STUDY = Study(
    "yu2024-fig6",
    Config(),
    Config("quick", settings=TINY, steps=4, more=0),
    compute,
    draw,
    claims,
    in_folder=True,
    scales={"paper": Config("paper", "vit-cifar10", settings={}, steps=None, lr=1e-4)},
    with_data=Config("cifar10", "vit-cifar10", settings=NARROW, steps=150),
)
