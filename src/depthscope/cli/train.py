"""`depthscope train RECIPE`: train a deep Transformer; stop and continue at any time."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli.settings import DATA_HELP, configured, with_settings
from depthscope.training.config import LANGUAGE_VARIANTS, LanguageVariant, TrainingConfig
from depthscope.training.recipes import RECIPES
from depthscope.training.run import Run, Tracker

if TYPE_CHECKING:
    from depthscope.training.run import Outcome

FAILED = 1  # exit code of a run that cannot go on: its loss is not finite
_DEFAULT_OUT = Path("depthscope-runs")
_RUN, _DATA = "The run", "Data"


def _train(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Without one, the recipes are listed.")] = None,
    variant: Annotated[
        LanguageVariant,
        typer.Option(
            help="Post-norm, pre-norm, or post-norm with de-escalation; in a language model with a causal mean, or "
            "with the paper's, which leaks."
        ),
    ] = "deescalated",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where the run is kept; by default a folder in depthscope-runs.", rich_help_panel=_RUN
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Continue the run in --out; from the start if there is none.", rich_help_panel=_RUN
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Print configuration, size and number of steps; train nothing.", rich_help_panel=_RUN
        ),
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|hf:NAME",
            help=DATA_HELP,
            rich_help_panel=_DATA,
        ),
    ] = None,
    allow_incomplete: Annotated[
        bool, typer.Option("--allow-incomplete", help="Use a folder that lacks some files.", rich_help_panel=_DATA)
    ] = False,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Save this often; by default every epoch.", rich_help_panel=_RUN),
    ] = None,
    evaluate_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="STEPS",
            help="Look at the test data this often; by default every epoch.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    log_every: Annotated[
        int, typer.Option(min=1, metavar="STEPS", help="Write numbers this often.", rich_help_panel=_RUN)
    ] = 10,
    keep: Annotated[int, typer.Option(min=1, help="How many checkpoints to keep.", rich_help_panel=_RUN)] = 2,
    tracker: Annotated[
        Tracker, typer.Option(help="Where curves go besides metrics.jsonl.", rich_help_panel=_RUN)
    ] = "tensorboard",
    watch_every: Annotated[
        int,
        typer.Option(
            min=0, metavar="STEPS", help="Measure the tokens of every block this often; 0: never.", rich_help_panel=_RUN
        ),
    ] = 50,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave GPUs alone.", rich_help_panel=_RUN)] = False,
    **changes: Any,
) -> None:
    """Train a deep Transformer: post-norm, pre-norm or de-escalated, on one device or under torchrun.

    Stopped by Ctrl-C or SIGTERM it saves its work first; the same command with --resume goes on as if nothing
    had happened.
    """
    if recipe is None:
        _list()
        return
    config = configured(recipe, variant, changes)
    if dry_run:
        _show_estimate(config, data, allow_incomplete)
        return
    folder = out or _DEFAULT_OUT / f"{config.recipe}-{config.variant}-{config.depth}-seed{config.seed}"
    run = Run(folder, resume, checkpoint_every, evaluate_every, log_every, keep, tracker, cpu, watch_every or None)
    _run(config, run, data, allow_incomplete)


def _run(config: TrainingConfig, run: Run, data: str | None, allow_incomplete: bool) -> None:
    from depthscope.models.memory import require_memory
    from depthscope.training.display import Quiet, Terminal
    from depthscope.training.estimate import estimate
    from depthscope.training.loop import NonFiniteLoss, train
    from depthscope.training.tasks import make_task

    processes, main = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0") == "0"
    parameters = estimate(config, processes).parameters
    require_memory(4 * parameters)  # weights, gradients, two moments
    display = Terminal() if main else Quiet()
    task = make_task(config, data, allow_incomplete=allow_incomplete)
    if note := getattr(getattr(task, "data", None), "note", ""):
        display.say(f"note: {note}")
    display.say(f"{config.recipe}, {config.variant}, {config.depth} blocks, {parameters:,} parameters → {run.out}")
    try:
        outcome = train(task, config, run, display=display)
    except NonFiniteLoss as error:
        if main:
            print("depthscope:", error, file=sys.stderr)
        raise typer.Exit(FAILED) from None
    if main:
        _show_outcome(outcome)
    if outcome.signal is not None:
        sys.exit(128 + outcome.signal)


def _show_outcome(outcome: Outcome) -> None:
    if outcome.signal is not None:
        print(
            f"depthscope: stopped at step {outcome.step} of {outcome.total_steps}, saved in {outcome.checkpoint}; "
            "the same command with --resume goes on",
            file=sys.stderr,
        )
        return
    numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in outcome.metrics.items())
    print(f"done: {outcome.step} steps, {numbers}; {outcome.checkpoint}")


def _show_estimate(config: TrainingConfig, data: str | None, allow_incomplete: bool) -> None:
    """The number of steps is that of the data if it is given, else that of the complete dataset."""
    from depthscope.training.estimate import estimate
    from depthscope.training.session import total_steps
    from depthscope.training.tasks import make_empty_task, make_task

    cost = estimate(config, int(os.environ.get("WORLD_SIZE", "1")))
    whole = data is None and not allow_incomplete
    task = make_empty_task(config) if whole else make_task(config, data, allow_incomplete=allow_incomplete)
    print(json.dumps(config.as_json(), indent=2))
    sizes = (cost.weights, cost.gradients, cost.optimizer, cost.activations)
    weights, gradients, moments, activations = (_bytes(size) for size in sizes)
    print(f"parameters  {cost.parameters:,}")
    print(
        f"memory      {_bytes(cost.total)} per process: weights {weights}, gradients {gradients}, "
        f"AdamW {moments}, activations {activations}"
    )
    print(f"steps       {total_steps(task, config):,} ({task.steps_per_epoch} per epoch)")
    print("nothing was trained")


def _bytes(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _list() -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table("recipe", "what it trains", "needs", box=None, header_style="bold", pad_edge=False)
    for name, entry in RECIPES.items():
        table.add_row(name, entry.title, entry.cost)
    console.print(table)
    variants = "|".join(LANGUAGE_VARIANTS)
    console.print(f"\ndepthscope train RECIPE --variant {variants}; --dry-run shows every setting.", markup=False)


train = with_settings(_train, "train")
