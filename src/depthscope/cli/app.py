"""The program `depthscope`: collects the commands and turns a user's mistake into one line."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from depthscope import __version__
from depthscope.cli.demo import demo
from depthscope.cli.depth import depth
from depthscope.cli.fix import fix
from depthscope.cli.help import Command, Group
from depthscope.cli.letters import write_legibly
from depthscope.cli.paths import paths
from depthscope.cli.probe import probe
from depthscope.cli.report import report
from depthscope.cli.schema import schema
from depthscope.cli.spectra import spectra
from depthscope.exit_codes import ExitCode
from depthscope.extras import MissingExtra
from depthscope.naming import visible
from depthscope_lab.cli.compare import compare
from depthscope_lab.cli.reproduce import reproduce
from depthscope_lab.cli.tour import tour
from depthscope_lab.cli.train import train

_UsageError: Any = typer.BadParameter.__base__  # unknown commands, options and values

app = typer.Typer(
    name="depthscope",
    cls=Group,
    help="See how deep your Transformer really is, learn why it stops, and make it go deeper.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(cls=Command)(demo)
app.command(cls=Command)(tour)
app.command(cls=Command)(probe)
app.command(cls=Command)(depth)
app.command(cls=Command)(fix)
app.command(cls=Command)(spectra)
app.command(cls=Command)(paths)
app.command(cls=Command)(reproduce)
app.command(cls=Command)(train)
app.command(cls=Command)(compare)
app.command(cls=Command)(report)
app.command(cls=Command)(schema)


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
        sys.exit(ExitCode.READER_GONE)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer has met it first
            sys.exit(ExitCode.READER_GONE)
        raise
    except (KeyboardInterrupt, typer.Abort):
        print("depthscope: interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    except _UsageError as error:
        message = error.format_message().replace(": Value error, ", ": ").rstrip(".")  # typer's words for our own
        message += _value_given(error, sys.argv[1:])
        end = "" if message.endswith("?") else "."
        _refuse(f"{message}{end} Try --help." if message else "")  # without a command, the help was printed
    except (ValueError, OSError, MissingExtra) as error:
        if os.environ.get("DEPTHSCOPE_TRACEBACK"):
            raise
        _refuse(_reason(error))
    else:
        if code == ExitCode.INTERRUPTED:  # typer turns Ctrl-C into this
            print("depthscope: interrupted", file=sys.stderr)
        sys.exit(code if isinstance(code, int) else 0)


def _reason(error: Exception) -> str:
    """What went wrong; of the system's own errors which file, and what it says of it."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{str(error.filename)!r}: " if error.filename is not None else ""
        return f"cannot use {where}{error.strerror}; check that it is there, and yours to read or write"
    return str(error) or type(error).__name__


def _value_given(error: Any, arguments: list[str]) -> str:
    """What was typed for the option that is refused, which typer does not always repeat: ", got '1e9'"."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names and (equals or place + 1 < len(arguments)):
            given = value if equals else arguments[place + 1]
            return "" if given in error.format_message() else f", got {given!r}"
    return ""


def _refuse(message: str) -> NoReturn:
    if message:
        print("depthscope:", visible(" ".join(message.split())), file=sys.stderr)
    sys.exit(ExitCode.MISTAKE)
