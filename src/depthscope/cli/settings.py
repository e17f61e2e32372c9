"""The settings of the recipes as options of a command: one for every field of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_origin

import typer

from depthscope.training.config import LanguageVariant, TrainingConfig, field_help, field_types
from depthscope.training.recipes import RECIPES

DATA_HELP = (
    "vit-cifar10: a folder cifar-10-batches-bin or -py, or a dataset; by default hf:uoft-cs/cifar10. "
    "txl-wikitext103: a folder of WikiText's token files, or a dataset."
)
_CONFIG = "The configuration (default: the recipe's)"


def configured(recipe: str, variant: LanguageVariant, changes: Mapping[str, Any]) -> TrainingConfig:
    """The recipe's configuration with what the user gave; None is what was not given."""
    if recipe not in RECIPES:
        close = get_close_matches(recipe, RECIPES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown recipe {recipe!r}: {hint}expected one of {', '.join(RECIPES)}")
    entry = RECIPES[recipe]
    if variant not in entry.variants:
        raise ValueError(f"{recipe} has no variant {variant!r}: expected one of {', '.join(entry.variants)}")
    types = field_types(entry.config)
    given = {name: value for name, value in changes.items() if value is not None}
    for name, value in given.items():
        if get_origin(types.get(name)) is tuple:
            given[name] = numbers("--" + name.replace("_", "-"), value)
    return entry.recipe(variant).changed(**given)


def numbers(option: str, text: str, kind: type[float] | type[int] = float) -> tuple[Any, ...]:
    """`1,2,3` as numbers."""
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise ValueError(f"expected {option} to be {what} separated by commas, got {text!r}") from None


def with_settings(body: Callable[..., None], name: str, without: tuple[str, ...] = ()) -> Callable[..., None]:
    """A command for typer: the parameters of `body`, and an option for every setting of every recipe."""
    own = [p for p in inspect.signature(body, eval_str=True).parameters.values() if p.kind is not p.VAR_KEYWORD]
    settings: dict[str, inspect.Parameter] = {}
    for entry in RECIPES.values():
        types = field_types(entry.config)
        for field, text in field_help(entry.config).items():
            if field in without:
                continue
            kind = str if get_origin(types[field]) is tuple else types[field]
            option = typer.Option(help=text, rich_help_panel=_CONFIG)
            settings[field] = inspect.Parameter(
                field, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
            )

    def command(**values: Any) -> None:
        body(**values)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + list(settings.values())
    command.__name__, command.__doc__ = name, body.__doc__
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command
