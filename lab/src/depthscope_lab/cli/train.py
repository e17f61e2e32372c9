"""`depthscope train RECIPE`: train a deep Transformer; stop and continue at any time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from depthscope.cli.command import add_report
from depthscope.cli.documents import print_document
from depthscope.cli.values import folder
from depthscope.exit_codes import ExitCode
from depthscope.files import require_writable
from depthscope.naming import visible
from depthscope.report.formats import folder_name
from depthscope_lab.cli import settings as options
from depthscope_lab.training.config import TrainingConfig, field_help
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.run import NonFiniteLoss, Run
from depthscope_lab.training.settings import written
from depthscope_lab.training.variants import VARIANTS

if TYPE_CHECKING:
    from depthscope_lab.training.run import Outcome
    from depthscope_lab.training.task import Task

_RULE = 'Stop, with exit code 3, if it holds: "token_similarity>0.99 for 3" watched steps. Can be repeated.'


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="Without one, recipes are listed.", autocompletion=options.complete_recipe
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            metavar="VARIANT",
            autocompletion=options.complete_variant,
            help="post, pre, deescalated, … (listed without RECIPE), also composed: 'deescalated(tau=0.5)'.",
        ),
    ] = "deescalated",
    depth: options.Depth = None,
    width: options.Width = None,
    batch_size: options.BatchSize = None,
    lr: options.Lr = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    seed: options.Seed = None,
    settings: options.Set = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", parser=folder, help="By default a folder in depthscope-runs.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out; from the start if there is none.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List every setting, and the cost; train nothing.")
    ] = False,
    stop_if: Annotated[list[str] | None, typer.Option(metavar="RULE", help=_RULE)] = None,
    data: options.Data = None,
    cpu: options.Cpu = False,
    as_json: options.Json = False,
) -> None:
    """Train a deep Transformer in some variant, on one device or under torchrun.

    Stopped by Ctrl-C or SIGTERM it saves its work first; the same command with --resume goes on as if nothing
    had happened. Stopped by a rule of --stop-if it keeps the last good checkpoint too, and names it.
    """
    changes = options.given(
        depth=depth, width=width, batch_size=batch_size, lr=lr, epochs=epochs, steps=steps, seed=seed
    )
    if recipe is None:
        if changes or any((settings, out, resume, dry_run, stop_if, data, cpu)):
            raise ValueError("expected a recipe before its options; `depthscope train` alone lists them")
        _list(as_json)
        return
    of_config, of_run = options.separated(recipe, settings, cpu, stop_if)
    config = options.configured(recipe, variant, of_config | changes)
    name = f"{config.recipe}-{folder_name(config.variant)}-{config.depth}-seed{config.seed}"
    run = Run(out or Path("depthscope-runs") / name, resume, **of_run)
    processes, rank = _place_among_processes()
    from depthscope_lab.training.loading import make_task

    if dry_run:
        from depthscope_lab.training.task import remedies_of

        remedies_of(config)  # refuses options that the run would refuse
        _show_cost(
            config,
            run,
            processes,
            as_json,
            lambda: make_task(config, data, empty=data is None),
        )
        return
    if rank == 0:
        require_writable(run.out)
    outcome = _train(config, run, processes, rank == 0, as_json, lambda: make_task(config, data))
    if rank == 0:
        add_report(run.out, "train")
    if outcome.stopped is not None:
        raise typer.Exit(ExitCode.GATE)


def _train(
    config: TrainingConfig, run: Run, processes: int, main: bool, as_json: bool, make_task: Callable[[], Task]
) -> Outcome:
    """Trains, and says how it ended: a line, on stderr if it was not the end, or an object of JSON."""
    from depthscope_lab.training.display import Display, Terminal
    from depthscope_lab.training.estimate import require_fits
    from depthscope_lab.training.loop import train

    parameters = require_fits(config, processes, cpu=run.cpu).parameters
    display = Terminal() if main else Display()
    about = {"recipe": config.recipe, "variant": config.variant, "blocks": config.depth, "parameters": parameters}
    about["out"] = str(run.out)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():  # a library's prints are no JSON
        task = make_task()
        display.say(f"{config.recipe}, {config.variant}, {config.depth} blocks, {parameters:,} parameters → {run.out}")
        failed = None
        try:
            outcome = train(task, config, run, display=display)
        except NonFiniteLoss as error:
            failed = str(error)
    if failed is not None:
        if main and as_json:
            nothing = dict.fromkeys(("step", "total_steps", "checkpoint", "signal", "stopped"))
            print_document("train", {**about, **nothing, "metrics": {}, "failed": failed})
        if main:
            print("depthscope:", visible(failed), file=sys.stderr)
        raise typer.Exit(ExitCode.NOT_FINITE)
    if main and as_json:
        checkpoint = None if outcome.checkpoint is None else str(outcome.checkpoint)
        print_document("train", {**about, **asdict(outcome), "checkpoint": checkpoint, "failed": None})
    if main and (early := outcome.how_it_ended_early) is not None:
        print(f"depthscope: {early}", file=sys.stderr)
    elif main and not as_json:
        numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in outcome.metrics.items())
        print(f"done: {outcome.step} steps, {numbers}; {visible(str(outcome.checkpoint))}")
    if outcome.signal is not None:
        sys.exit(128 + outcome.signal)
    return outcome


def _place_among_processes() -> tuple[int, int]:
    """How many processes there are, and which of them this is; torchrun says both in the environment."""
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    if size.isdecimal() and rank.isdecimal() and int(rank) < int(size):
        return int(size), int(rank)
    found = f"WORLD_SIZE={size!r}, RANK={rank!r}"
    raise ValueError(f"expected WORLD_SIZE of at least 1 and a RANK below it, as torchrun sets them, got {found}")


def _show_cost(config: TrainingConfig, run: Run, processes: int, as_json: bool, make_task: Callable[[], Task]) -> None:
    """Every setting, the size, and the number of steps of the task; what is too large is refused before it is made."""
    from depthscope_lab.training.estimate import estimate
    from depthscope_lab.training.task import total_steps

    cost, task = estimate(config, processes), make_task()
    memory = {name: getattr(cost, name) for name in ("weights", "gradients", "optimizer", "activations", "total")}
    steps = total_steps(task, config)
    if as_json:
        where = {"out": str(run.out), **{name: getattr(run, name) for name in field_help(Run)}}
        found: dict[str, Any] = {"dry_run": True, "config": config.as_json(), "run": where}
        found |= {"parameters": cost.parameters, "memory": memory, "steps": steps}
        print_document("train", {**found, "steps_per_epoch": task.steps_per_epoch})
        return
    print(f"{config.recipe}: change any of these settings with --set name=value, the first four with --variant")
    made_of = {"variant": config.variant, "wiring": config.wiring}
    made_of["remedies"] = " ".join(map(str, config.remedies)) or "none"
    made_of["initialiser"] = config.initialiser or "the model's own"
    for name, text in made_of.items():
        print(f"{name:<24}{text}")
    for part in (config, run):
        for name, text in field_help(type(part)).items():
            print(f"{name:<24}{written(getattr(part, name)):<12} {text}")
    sizes = ", ".join(f"{name} {size / 1e9:.3g} GB" for name, size in memory.items())
    print(f"parameters  {cost.parameters:,}\nmemory      per process: {sizes}")
    print(f"steps       {steps:,} ({task.steps_per_epoch} per epoch)\nnothing was trained")


def _list(as_json: bool) -> None:
    """The recipes and the variants that there are."""
    if as_json:
        recipes = {name: {"title": entry.title, "cost": entry.cost} for name, entry in RECIPES.items()}
        variants = {name: {"title": variant.title} for name, variant in VARIANTS.items()}
        print_document("train", {"recipes": recipes, "variants": variants})
        return
    from depthscope.cli.console import Screen

    console = Screen()
    named = [(name, entry.title, entry.cost) for name, entry in RECIPES.items()]
    console.show_rows(("recipe", "what it trains", "needs"), named)
    console.show_rows(("variant", "what it is"), [(name, variant.title) for name, variant in VARIANTS.items()])
    console.print("depthscope train RECIPE --variant VARIANT; --dry-run lists every setting.")
