"""The program `depthscope`: collects the commands and turns a user's mistake into one line."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from depthscope import __version__
from depthscope.cli.compare import compare
from depthscope.cli.demo import demo
from depthscope.cli.fix import fix
from depthscope.cli.letters import write_legibly
from depthscope.cli.probe import probe
from depthscope.cli.reproduce import reproduce
from depthscope.cli.train import train
from depthscope.extras import MissingExtra

USER_ERROR = 2
INTERRUPTED = 130
_UsageError: Any = typer.BadParameter.__base__  # unknown commands, options and values

app = typer.Typer(
    name="depthscope",
    help="See how deep your Transformer really is, learn why it stops, and make it go deeper.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(demo)
app.command()(probe)
app.command()(fix)
app.command()(reproduce)
app.command()(train)
app.command()(compare)


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
    """Runs the program. A user's mistake (usage, `ValueError`, files, missing extras) ends in one line and code 2."""
    write_legibly()
    try:
        code = app(prog_name="depthscope", standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, say `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (KeyboardInterrupt, typer.Abort):
        print("depthscope: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except _UsageError as error:
        message = error.format_message().rstrip(".")
        _refuse(f"{message}. Try --help." if message else "")  # without a command, the help was printed
    except (ValueError, OSError, MissingExtra) as error:
        if os.environ.get("DEPTHSCOPE_TRACEBACK"):
            raise
        _refuse(str(error) or type(error).__name__)
    else:
        if code == INTERRUPTED:  # typer turns Ctrl-C into this
            print("depthscope: interrupted", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _refuse(message: str) -> NoReturn:
    if message:
        print("depthscope:", " ".join(message.split()), file=sys.stderr)
    sys.exit(USER_ERROR)
