"""A help that fits 80 columns and one screen: `--help` shows what people use, `--help-all` every option.

An option that stands in a panel of its own, such as "Input", is one for `--help-all`.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

ALL = "all_options"  # the parameter of `--help-all`


class _Short:
    """For a command of typer: a flag is followed by nothing, not by `<bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in found:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""
        return found


class Command(_Short, TyperCommand):
    """A command with a short help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if any(parameter.name == ALL for parameter in self.params):
            for parameter in self.params:
                if getattr(parameter, "rich_help_panel", None):
                    parameter.hidden = not ctx.meta.get(ALL)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


class Group(_Short, TyperGroup):
    """The program itself, likewise."""


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[ALL] = True
        ctx.get_help()  # which prints
        raise typer.Exit


HELP_ALL = typer.Option(
    "--help-all", callback=_show_all, is_eager=True, expose_value=False, help="Show every option and exit."
)
