"""A help that fits 80 columns: no type beside a flag, no range of nineteen digits beside a seed."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_GREATEST = 2**63 - 1  # what torch counts with, and takes as a seed


class _Short:
    """For a command of typer: `--json` is followed by nothing, and its help by `<bool>` only if it says so itself."""

    params: list[Any]

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        for parameter in self.params:
            _shorten(parameter)

    def get_help_option(self, ctx: Any) -> Any:
        return _shorten(super().get_help_option(ctx))  # type: ignore[misc]


class Command(_Short, TyperCommand):
    """A command with a short help."""


class Group(_Short, TyperGroup):
    """The program itself, likewise."""


def _shorten(parameter: Any) -> Any:
    if getattr(parameter, "is_flag", False) and parameter.metavar is None:
        parameter.metavar = ""
    return parameter


def seed(given: str | int) -> int:
    """A seed that torch takes."""
    return _whole_number(given, least=0)


def count_of_seeds(given: str | int) -> int:
    """How many seeds from 0 on, each of which torch takes."""
    return _whole_number(given, least=1)


def counted(help: str, panel: str | None = None, *, least: int = 1, metavar: str = "N") -> Any:
    """The option of a number of things, as many as torch can count."""

    def count(given: str | int) -> int:
        return _whole_number(given, least)

    return typer.Option(metavar=metavar, parser=count, help=help, rich_help_panel=panel)


def _whole_number(given: str | int, least: int) -> int:
    try:
        number = int(given)
    except ValueError:
        number = -1
    if not least <= number <= _GREATEST:
        raise ValueError(f"expected a whole number from {least} to {_GREATEST}, got {given!r}")
    return number
