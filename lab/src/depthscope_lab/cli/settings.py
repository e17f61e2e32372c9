"""What `train` and `compare` share: a recipe, its variant, and settings by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from depthscope.cli.values import data
from depthscope_lab.training.config import TrainingConfig, changeable, field_help
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.run import Run
from depthscope_lab.training.settings import read_settings

DATA_HELP = (
    "vit-cifar10: a folder cifar-10-batches-bin or -py, or a dataset; by default hf:uoft-cs/cifar10. "
    "txl-wikitext103: a folder of WikiText's token files, or a dataset."
)
SETTINGS = "Settings (default: the recipe's)"


def setting(name: str) -> Any:
    """The option of a setting that is changed every day."""
    return typer.Option(help=field_help(TrainingConfig)[name], rich_help_panel=SETTINGS)


Width = Annotated[int | None, setting("width")]
BatchSize = Annotated[int | None, setting("batch_size")]
Lr = Annotated[float | None, setting("lr")]
Epochs = Annotated[int | None, setting("epochs")]
Steps = Annotated[int | None, setting("steps")]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any other setting, as often as needed; --dry-run lists them all.",
        rich_help_panel=SETTINGS,
    ),
]
Data = Annotated[str | None, typer.Option(metavar="DIR|hf:NAME", parser=data, help=DATA_HELP)]
AllowIncomplete = Annotated[bool, typer.Option("--allow-incomplete", help="Use a folder that lacks some files.")]
_GATE = "Gate"
StopIf = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RULE",
        help='Stop, with exit code 3, if it holds: "token_similarity>0.99 for 3" watched steps, unless the loss falls. '
        "Can be repeated.",
        rich_help_panel=_GATE,
    ),
]
WarnIf = Annotated[
    list[str] | None,
    typer.Option(metavar="RULE", help="The same, and only a warning. Can be repeated.", rich_help_panel=_GATE),
]
Cpu = Annotated[bool, typer.Option("--cpu", help="Leave GPUs alone.")]


def given(**options: Any) -> dict[str, Any]:
    """The options that the user gave: None is what was not."""
    return {name: value for name, value in options.items() if value is not None}


def separated(
    recipe: str,
    settings: Sequence[str] | None,
    cpu: bool,
    stop_if: Sequence[str] | None = None,
    warn_if: Sequence[str] | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`--set` as settings of the configuration and of the run; --cpu and the rules are of the latter."""
    of_run, of_config = changeable(Run), changeable(RECIPES[recipe].config)
    found = read_settings(settings or [], of_config | of_run)
    if cpu:
        found["cpu"] = True
    if found.get("watch_every") == 0:
        found["watch_every"] = None
    for name, rules in (("stop_if", stop_if), ("warn_if", warn_if)):
        if rules:
            found[name] = (*found.get(name, ()), *rules)
    return (
        {name: value for name, value in found.items() if name in of_config},
        {name: value for name, value in found.items() if name in of_run},
    )


def configured(recipe: str, variant: str, changes: Mapping[str, Any]) -> TrainingConfig:
    """The recipe's configuration of a variant, with what the user changes."""
    return RECIPES[recipe](variant).changed(**changes)


def numbers(option: str, text: str, kind: type[float] | type[int] = float) -> tuple[Any, ...]:
    """`1,2,3` as numbers, at least one."""
    try:
        found = tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"expected {option} to be {what} separated by commas, got {text!r}") from None
    if not found:
        raise ValueError(f"expected {option} to be at least one number, got {text!r}")
    return found
