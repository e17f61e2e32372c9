"""What `depthscope train` shows: the lists, the settings with their cost, how a run ended."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from depthscope.cli.documents import print_document
from depthscope.naming import visible
from depthscope_lab.training.config import TrainingConfig, field_help
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.run import NonFiniteLoss, Run
from depthscope_lab.training.settings import written
from depthscope_lab.training.variants import VARIANTS

if TYPE_CHECKING:
    from depthscope_lab.training.run import Outcome
    from depthscope_lab.training.task import Task


def show_outcome(outcome: Outcome | NonFiniteLoss, as_json: bool, about: dict[str, Any]) -> None:
    """How a run ended: a line, on stderr if it did not go to its end, or with `--json` an object on stdout."""
    if as_json:
        print_document("train", about | _as_json(outcome))
    if isinstance(outcome, NonFiniteLoss):
        print("depthscope:", visible(str(outcome)), file=sys.stderr)
        return
    if (early := outcome.how_it_ended_early) is not None:
        print(f"depthscope: {early}", file=sys.stderr)
    elif not as_json:
        numbers = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in outcome.metrics.items())
        print(f"done: {outcome.step} steps, {numbers}; {visible(str(outcome.checkpoint))}")


def _as_json(outcome: Outcome | NonFiniteLoss) -> dict[str, Any]:
    if isinstance(outcome, NonFiniteLoss):
        nothing = dict.fromkeys(("step", "total_steps", "checkpoint", "signal", "stopped"))
        return {**nothing, "metrics": {}, "failed": str(outcome)}
    checkpoint = None if outcome.checkpoint is None else str(outcome.checkpoint)
    return {**asdict(outcome), "checkpoint": checkpoint, "failed": None}


def show_estimate(
    config: TrainingConfig, run: Run, processes: int, as_json: bool, make_task: Callable[[], Task]
) -> None:
    """Every setting, the size, and the number of steps of the task; what is too large is refused before it is made."""
    from depthscope_lab.training.estimate import estimate
    from depthscope_lab.training.session import total_steps

    cost = estimate(config, processes)
    task = make_task()
    sizes = {name: getattr(cost, name) for name in ("weights", "gradients", "optimizer", "activations", "total")}
    steps = total_steps(task, config)
    if as_json:
        where = {"out": str(run.out), **{name: getattr(run, name) for name in field_help(Run)}}
        found = {"dry_run": True, "config": config.as_json(), "run": where, "parameters": cost.parameters}
        print_document("train", {**found, "memory": sizes, "steps": steps, "steps_per_epoch": task.steps_per_epoch})
        return
    _show_settings(config, run)
    weights, gradients, moments, activations, total = map(_bytes, sizes.values())
    print(f"parameters  {cost.parameters:,}")
    print(
        f"memory      {total} per process: weights {weights}, gradients {gradients}, "
        f"AdamW {moments}, activations {activations}"
    )
    print(f"steps       {steps:,} ({task.steps_per_epoch} per epoch)")
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


def show_list(as_json: bool) -> None:
    """The recipes and the variants that there are."""
    if as_json:
        recipes = {name: {"title": entry.title, "cost": entry.cost} for name, entry in RECIPES.items()}
        variants = {name: {"title": variant.title} for name, variant in VARIANTS.items()}
        print_document("train", {"recipes": recipes, "variants": variants})
        return
    from rich.table import Table

    from depthscope.cli.console import Screen

    console = Screen()
    table = Table("recipe", "what it trains", "needs", box=None, header_style="bold", pad_edge=False)
    for name, entry in RECIPES.items():
        table.add_row(name, entry.title, entry.cost)
    console.print(table)
    others = Table("variant", "what it is", box=None, header_style="bold", pad_edge=False)
    for name, variant in VARIANTS.items():
        others.add_row(name, variant.title)
    console.print("")
    console.print(others)
    console.print("\ndepthscope train RECIPE --variant VARIANT; --dry-run lists every setting.", markup=False)
