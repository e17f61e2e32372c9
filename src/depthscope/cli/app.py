"""The program `depthscope`: collects the commands and turns a user's mistake into one line."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from depthscope import __version__
from depthscope.cli.demo import demo
from depthscope.extras import MissingExtra

USER_ERROR = 2

app = typer.Typer(
    name="depthscope",
    help="See how deep your Transformer really is, learn why it stops, and make it go deeper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"depthscope {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that stand before the command."""


def main() -> None:
    """Runs the program. Mistakes of the user (`ValueError`, files, missing extras) end in one line and code 2."""
    try:
        app(prog_name="depthscope")
    except BrokenPipeError:  # the reader, say `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (ValueError, OSError, MissingExtra) as error:
        if os.environ.get("DEPTHSCOPE_TRACEBACK"):
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        print(f"depthscope: {message}", file=sys.stderr)
        sys.exit(USER_ERROR)
