"""`depthscope report DIR…`: the answer on one page, of what earlier commands have saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from depthscope.cli.command import say_damaged
from depthscope.cli.values import folder
from depthscope.files import require_writable
from depthscope.naming import visible


def report(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="DIR...", help="What --out of any command wrote. Several are set side by side."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", parser=folder, help="Where report.html goes; by default into the first DIR."),
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page; by default the model's name.")] = "",
) -> None:
    """Write one HTML page of what was measured: verdict, charts, all numbers. Nothing is computed again."""
    places = [folder(name) for name in folders]
    target = out or (places[0] if places[0].is_dir() else places[0].parent)
    require_writable(target)

    from depthscope.report import write

    page = write(target / "report.html", *places, title=title, say=say_damaged)
    print(f"wrote {visible(str(page))}")
