"""`depthscope train RECIPE`: train a deep Transformer; stop and continue at any time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from depthscope.cli.reporting import add_report
from depthscope.cli.values import folder
from depthscope.exit_codes import ExitCode
from depthscope.files import require_writable
from depthscope.report.formats import folder_name
from depthscope_lab.cli import completion
from depthscope_lab.cli import settings as options
from depthscope_lab.cli.train_display import show_estimate, show_list, show_outcome
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.run import NonFiniteLoss, Run

if TYPE_CHECKING:
    from depthscope_lab.training.run import Outcome
    from depthscope_lab.training.task import Task

_DEFAULT_OUT = Path("depthscope-runs")


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="Without one, the recipes are listed.", autocompletion=completion.recipes
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            metavar="VARIANT",
            autocompletion=completion.variants,
            help="post, pre, deescalated, … (the list without RECIPE has them all), also composed: "
            "'deescalated(tau=0.5)', 'post@xavier'.",
        ),
    ] = "deescalated",
    depth: Annotated[int | None, options.setting("depth")] = None,
    width: options.Width = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    seed: Annotated[int | None, options.setting("seed")] = None,
    settings: options.Set = None,
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
    stop_if: options.StopIf = None,
    warn_if: options.WarnIf = None,
    data: options.Data = None,
    allow_incomplete: options.AllowIncomplete = False,
    cpu: options.Cpu = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and all else on stderr.")] = False,
) -> None:
    """Train a deep Transformer in some variant, on one device or under torchrun.

    Stopped by Ctrl-C or SIGTERM it saves its work first; the same command with --resume goes on as if nothing
    had happened. Stopped by a rule of --stop-if it keeps the last good checkpoint too, and names it.
    """
    every_day = options.given(
        depth=depth, width=width, batch_size=batch_size, lr=lr, epochs=epochs, steps=steps, seed=seed
    )
    if recipe is None:
        if every_day or any((settings, out, resume, dry_run, stop_if, warn_if, data, allow_incomplete, cpu)):
            raise ValueError("expected a recipe before its options; `depthscope train` alone lists them")
        show_list(as_json)
        return
    of_config, of_run = options.separated(recipe, settings, cpu, stop_if, warn_if)
    config = options.configured(recipe, variant, of_config | every_day)
    place = out or _DEFAULT_OUT / f"{config.recipe}-{folder_name(config.variant)}-{config.depth}-seed{config.seed}"
    run = Run(place, resume, **of_run)
    if run.stop_if or run.warn_if:
        from depthscope_lab.training.observation import require_rules

        require_rules(run)
    processes, rank = _place_among_processes()
    if dry_run:
        from depthscope_lab.training.building import remedies_of

        remedies_of(config)  # refuses options that the run would refuse
        whole = data is None and not allow_incomplete
        show_estimate(config, run, processes, as_json, lambda: _task(config, data, allow_incomplete, empty=whole))
        return
    if rank == 0:
        require_writable(run.out)
    outcome = _run(config, run, processes, rank == 0, as_json, lambda: _task(config, data, allow_incomplete))
    if rank == 0:
        add_report(run.out, "train")
    if outcome.stopped is not None:
        raise typer.Exit(ExitCode.GATE)


def _task(config: TrainingConfig, data: str | None, allow_incomplete: bool, *, empty: bool = False) -> Task:
    """`empty`: as many steps as the complete dataset has, which is not read."""
    from depthscope_lab.training.loading import make_empty_task, make_task

    return make_empty_task(config) if empty else make_task(config, data, allow_incomplete=allow_incomplete)


def _run(
    config: TrainingConfig, run: Run, processes: int, main: bool, as_json: bool, make_task: Callable[[], Task]
) -> Outcome:
    from depthscope_lab.training.display import Display, Terminal
    from depthscope_lab.training.estimate import require_fits
    from depthscope_lab.training.loop import train

    parameters = require_fits(config, processes, cpu=run.cpu).parameters
    display = Terminal() if main else Display()
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # a library's prints are no JSON
        task = make_task()
        if note := getattr(getattr(task, "data", None), "note", ""):
            display.say(f"note: {note}")
        display.say(f"{config.recipe}, {config.variant}, {config.depth} blocks, {parameters:,} parameters → {run.out}")
        outcome: Outcome | NonFiniteLoss
        try:
            outcome = train(task, config, run, display=display)
        except NonFiniteLoss as error:
            outcome = error
    if main:
        about = {"recipe": config.recipe, "variant": config.variant, "blocks": config.depth, "parameters": parameters}
        show_outcome(outcome, as_json, {**about, "out": str(run.out)})
    if isinstance(outcome, NonFiniteLoss):
        raise typer.Exit(ExitCode.NOT_FINITE)
    if outcome.signal is not None:
        sys.exit(128 + outcome.signal)
    return outcome


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
