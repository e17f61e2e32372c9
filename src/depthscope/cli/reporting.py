"""What `--out` adds to the files of every command: how they were made, and the page that shows them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthscope.extras import MissingExtra
from depthscope.files import write_whole
from depthscope.naming import visible
from depthscope.sealed import COMMANDS, read_commands, record_writer

_OUR_NAMES = ("depthscope", "depthscope.exe", "__main__.py")


def add_report(folder: Path, command: str, python: str = "") -> None:
    """Writes `commands.json` and `report.html` into a folder whose other files are complete.

    Without the extra, or beside something damaged that an earlier command left there, there is no page, and one line
    on stderr says why.
    """
    note_command(folder, command, python)
    from depthscope.report import write

    try:
        write(folder / "report.html", folder, say=say_damaged)
    except (MissingExtra, ValueError) as error:
        say_missing(error)


def say_missing(error: Exception) -> None:
    """Everything else is there: no error."""
    print(f"depthscope: no report.html: {visible(str(error))}", file=sys.stderr)


def say_damaged(text: str) -> None:
    """A file that the page names and does not show."""
    print(f"depthscope: not shown: {visible(text)}", file=sys.stderr)


def note_command(folder: Path, command: str, python: str) -> None:
    """Adds to `commands.json` what was typed, and the line of Python that does the same; one entry per command."""
    kept: dict[str, Any] = {}
    place = folder / COMMANDS
    try:
        kept = read_commands(folder)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        print(f"depthscope: {visible(str(error))}; it is written anew", file=sys.stderr)
    said = {"typed": typed(), "in Python": python}
    known = {**kept, command: {name: text for name, text in said.items() if text}}
    write_whole(place, record_writer("commands", 1, known))


def typed() -> str:
    """The command line, quoted for a shell; "" where this is not our program."""
    return shlex.join(["depthscope", *sys.argv[1:]]) if Path(sys.argv[0]).name in _OUR_NAMES else ""


def call(function: str, first: str, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    """`depthscope.probe(model, inputs, measures='all')`: what differs from the defaults is written."""
    chosen = [f"{name}={value!r}" for name, value in options.items() if value != defaults.get(name)]
    return f"depthscope.{function}({', '.join([first, *chosen])})"
