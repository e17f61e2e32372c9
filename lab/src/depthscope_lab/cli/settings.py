"""What `train` and `compare` share: a recipe, its variant, and settings by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from depthscope.cli.completion import beginning
from depthscope.cli.values import data
from depthscope_lab.training.config import TrainingConfig, changeable, field_help
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.run import Run
from depthscope_lab.training.settings import read_settings
from depthscope_lab.training.variants import VARIANTS

_PANEL = "Settings (default: the recipe's)"
_DATA = "vit-cifar10: the folder cifar-10-batches-bin. txl-wikitext103: a folder of token files, or a dataset."


def _setting(name: str) -> Any:
    """The option of a setting that is changed every day."""
    return typer.Option(help=field_help(TrainingConfig)[name], rich_help_panel=_PANEL)


Depth = Annotated[int | None, _setting("depth")]
Width = Annotated[int | None, _setting("width")]
BatchSize = Annotated[int | None, _setting("batch_size")]
Lr = Annotated[float | None, _setting("lr")]
Epochs = Annotated[int | None, _setting("epochs")]
Steps = Annotated[int | None, _setting("steps")]
Seed = Annotated[int | None, _setting("seed")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting, as often as needed; `depthscope train RECIPE --dry-run` lists them all.",
        rich_help_panel=_PANEL,
    ),
]
Data = Annotated[str | None, typer.Option(metavar="DIR|hf:NAME", parser=data, help=_DATA)]
Cpu = Annotated[bool, typer.Option("--cpu", help="Leave GPUs alone.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object, and all else on stderr.")]


def complete_recipe(incomplete: str) -> list[str]:
    return beginning(RECIPES.ours(), incomplete)


def complete_variant(incomplete: str) -> list[str]:
    """One, or the last of several that are separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in beginning(VARIANTS.ours(), last)]


def given(**options: Any) -> dict[str, Any]:
    """The options that the user has typed: None is what was not."""
    return {name: value for name, value in options.items() if value is not None}


def separated(
    recipe: str, settings: Sequence[str] | None, cpu: bool, stop_if: Sequence[str] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`--set` as settings of the configuration and of the run; --cpu and the rules are of the latter."""
    of_run, of_config = changeable(Run), changeable(RECIPES[recipe].config)
    found = read_settings(settings or [], of_config | of_run)
    if cpu:
        found["cpu"] = True
    if found.get("watch_every") == 0:
        found["watch_every"] = None
    if stop_if:
        found["stop_if"] = (*found.get("stop_if", ()), *stop_if)
    if found.keys() & {"stop_if", "warn_if"}:
        from pathlib import Path

        from depthscope_lab.training.observation import require_rules

        require_rules(Run(Path(), **{name: value for name, value in found.items() if name in of_run}))
    return (
        {name: value for name, value in found.items() if name in of_config},
        {name: value for name, value in found.items() if name in of_run},
    )


def configured(recipe: str, variant: str, changes: Mapping[str, Any]) -> TrainingConfig:
    """The recipe's configuration of a variant, with what the user changes."""
    return RECIPES[recipe](variant).changed(**changes)
