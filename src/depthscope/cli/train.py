"""`depthscope train RECIPE`: train a deep Transformer; stop and continue at any time."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthscope.cli.folders import folder
from depthscope.cli.settings import (
    AllowIncomplete,
    BatchSize,
    Cpu,
    Data,
    Epochs,
    Lr,
    Set,
    Steps,
    Width,
    configured,
    given,
    separated,
    setting,
)
from depthscope.files import require_writable
from depthscope.naming import visible
from depthscope.training.config import TrainingConfig, field_help
from depthscope.training.recipes import RECIPES
from depthscope.training.run import NonFiniteLoss, Run
from depthscope.training.settings import written
from depthscope.training.signals import end_with_parent
from depthscope.training.variants import VARIANTS, folder_name

if TYPE_CHECKING:
    from depthscope.training.run import Outcome

FAILED = 1  # exit code of a run that cannot go on: its loss is not finite
_DEFAULT_OUT = Path("depthscope-runs")


def train(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Without one, the recipes are listed.")] = None,
    variant: Annotated[
        str,
        typer.Option(
            metavar="VARIANT",
            help="post, pre, deescalated, … (the list without RECIPE has them all), also composed: "
            "'deescalated(tau=0.5)', 'post+residual-weight(alpha=0.3)@xavier'.",
        ),
    ] = "deescalated",
    depth: Annotated[int | None, setting("depth")] = None,
    width: Width = None,
    batch_size: BatchSize = None,
    lr: Lr = None,
    epochs: Epochs = None,
    steps: Steps = None,
    seed: Annotated[int | None, setting("seed")] = None,
    settings: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=folder, help="Where the run is kept; by default a folder in depthscope-runs."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out; from the start if there is none.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List every setting, size and number of steps; train nothing.")
    ] = False,
    data: Data = None,
    allow_incomplete: AllowIncomplete = False,
    cpu: Cpu = False,
) -> None:
    """Train a deep Transformer in some variant, on one device or under torchrun.

    Stopped by Ctrl-C or SIGTERM it saves its work first; the same command with --resume goes on as if nothing
    had happened.
    """
    end_with_parent()
    if recipe is None:
        _list()
        return
    of_config, of_run = separated(recipe, settings, cpu)
    every_day = given(depth=depth, width=width, batch_size=batch_size, lr=lr, epochs=epochs, steps=steps, seed=seed)
    config = configured(recipe, variant, of_config | every_day)
    place = out or _DEFAULT_OUT / f"{config.recipe}-{folder_name(config.variant)}-{config.depth}-seed{config.seed}"
    run = Run(place, resume, **of_run)
    processes, rank = _place_among_processes()
    if dry_run:
        _show_estimate(config, run, processes, data, allow_incomplete)
        return
    if rank == 0:
        require_writable(run.out)
    _run(config, run, processes, rank == 0, data, allow_incomplete)


def _run(
    config: TrainingConfig, run: Run, processes: int, main: bool, data: str | None, allow_incomplete: bool
) -> None:
    from depthscope.training.display import Quiet, Terminal
    from depthscope.training.estimate import require_fits
    from depthscope.training.loading import make_task
    from depthscope.training.loop import train

    parameters = require_fits(config, processes, cpu=run.cpu).parameters
    display = Terminal() if main else Quiet()
    task = make_task(config, data, allow_incomplete=allow_incomplete)
    if note := getattr(getattr(task, "data", None), "note", ""):
        display.say(f"note: {note}")
    display.say(f"{config.recipe}, {config.variant}, {config.depth} blocks, {parameters:,} parameters → {run.out}")
    try:
        outcome = train(task, config, run, display=display)
    except NonFiniteLoss as error:
        if main:
            print("depthscope:", visible(str(error)), file=sys.stderr)
        raise typer.Exit(FAILED) from None
    if main:
        _show_outcome(outcome)
    if outcome.signal is not None:
        sys.exit(128 + outcome.signal)


def _place_among_processes() -> tuple[int, int]:
    """How many processes there are, and which of them this is; torchrun says both in the environment."""
    given = {name: os.environ.get(name, alone) for name, alone in (("WORLD_SIZE", "1"), ("RANK", "0"))}
    try:
        size, rank = map(int, given.values())
    except ValueError:
        size, rank = 0, 0
    if not 0 <= rank < size:
        found = ", ".join(f"{name}={text!r}" for name, text in given.items())
        raise ValueError(f"expected WORLD_SIZE of at least 1 and a RANK below it, as torchrun sets them, got {found}")
    return size, rank


def _show_outcome(outcome: Outcome) -> None:
    place = visible(str(outcome.checkpoint))
    if outcome.signal is not None:
        print(
            f"depthscope: stopped at step {outcome.step} of {outcome.total_steps}, saved in {place}; "
            "the same command with --resume goes on",
            file=sys.stderr,
        )
        return
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in outcome.metrics.items())
    print(f"done: {outcome.step} steps, {numbers}; {place}")


def _show_estimate(config: TrainingConfig, run: Run, processes: int, data: str | None, allow_incomplete: bool) -> None:
    """The number of steps is that of the data if it is given, else that of the complete dataset."""
    from depthscope.training.estimate import estimate
    from depthscope.training.loading import make_empty_task, make_task
    from depthscope.training.session import total_steps

    cost = estimate(config, processes)
    whole = data is None and not allow_incomplete
    task = make_empty_task(config) if whole else make_task(config, data, allow_incomplete=allow_incomplete)
    _show_settings(config, run)
    sizes = (cost.weights, cost.gradients, cost.optimizer, cost.activations)
    weights, gradients, moments, activations = (_bytes(size) for size in sizes)
    print(f"parameters  {cost.parameters:,}")
    print(
        f"memory      {_bytes(cost.total)} per process: weights {weights}, gradients {gradients}, "
        f"AdamW {moments}, activations {activations}"
    )
    print(f"steps       {total_steps(task, config):,} ({task.steps_per_epoch} per epoch)")
    print("nothing was trained")


def _show_settings(config: TrainingConfig, run: Run) -> None:
    """Every setting: its name, its value and what it does; first those that change the numbers."""
    made_of = {
        "variant": config.variant,
        "wiring": config.wiring,
        "remedies": " ".join(map(str, config.remedies)) or "none",
        "initialiser": config.initialiser or "the model's own",
    }
    print(f"{config.recipe}: change any of these settings with --set name=value, the first four with --variant")
    for name, value in made_of.items():
        print(f"{name:<24}{value}")
    for part in (config, run):
        for name, text in field_help(type(part)).items():
            print(f"{name:<24}{written(getattr(part, name)):<12} {text}")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _list() -> None:
    from rich.table import Table

    from depthscope.cli.console import Screen

    console = Screen()
    table = Table("recipe", "what it trains", "needs", box=None, header_style="bold", pad_edge=False)
    for name, entry in RECIPES.items():
        table.add_row(name, entry.title, entry.cost)
    console.print(table)
    variants = Table("variant", "what it is", box=None, header_style="bold", pad_edge=False)
    for name, variant in VARIANTS.items():
        variants.add_row(name, variant.title)
    console.print("")
    console.print(variants)
    console.print("\ndepthscope train RECIPE --variant VARIANT; --dry-run lists every setting.", markup=False)
