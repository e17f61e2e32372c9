"""The program `depthscope`: collects the commands, the lab's too, and turns a user's mistake into one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer

from depthscope import __version__
from depthscope.cli.agents import agents
from depthscope.cli.console import write_legibly
from depthscope.cli.demo import demo
from depthscope.cli.depth import depth
from depthscope.cli.documents import schema
from depthscope.cli.fix import fix
from depthscope.cli.help import Command, Group
from depthscope.cli.paths import paths
from depthscope.cli.probe import probe
from depthscope.cli.report import report
from depthscope.cli.spectra import spectra
from depthscope.exit_codes import ExitCode
from depthscope.extras import MissingExtra
from depthscope.naming import visible
from depthscope.registry import Registry

_UsageError: Any = typer.BadParameter.__base__  # unknown commands, options and values
_FIRST = ("probe", "depth", "fix", "report", "agents")  # what people use
_OF_THE_LAB = ("reproduce", "compare", "train", "tour")
_HIDDEN = ("demo", "schema")

app = typer.Typer(
    name="depthscope",
    cls=Group,
    help="See how deep your Transformer really is, learn why it stops, and make it go deeper.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
# Ours, and those of installed packages: the lab's, which train.
COMMANDS: Registry[Callable[..., None]] = Registry(
    "command", "depthscope.commands", [probe, depth, fix, report, agents, paths, spectra, demo, schema], name_of=None
)


def _without_the_lab(name: str) -> Callable[[], None]:
    """Stands in for a command of the lab where that is not installed: one line says what to do."""

    def refuse() -> None:
        raise MissingExtra(f"{name} comes with depthscope-lab, which is not installed: pip install ./lab in a checkout")

    refuse.__doc__ = "Comes with depthscope-lab, which is not installed."
    return refuse


for _name in dict.fromkeys([*COMMANDS.ours(), *_OF_THE_LAB, *COMMANDS]):
    _missing = _name not in COMMANDS
    app.command(
        _name,
        cls=Command,
        rich_help_panel=None if _name in _FIRST else "For research",
        hidden=_name in _HIDDEN,
        add_help_option=not _missing,
        context_settings={"allow_extra_args": _missing, "ignore_unknown_options": _missing},
    )(_without_the_lab(_name) if _missing else COMMANDS[_name])


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
        code = ExitCode.INTERRUPTED
    except _UsageError as error:
        message = error.format_message().replace(": Value error, ", ": ").rstrip(".")  # typer's words for our own
        message += _typed_value(error, sys.argv[1:])
        end = "" if message.endswith("?") else "."
        _refuse(f"{message}{end} Try --help." if message else "")  # without a command, the help was printed
    except (ValueError, OSError, MissingExtra) as error:
        if os.environ.get("DEPTHSCOPE_TRACEBACK"):
            raise
        if isinstance(error, OSError) and error.strerror:
            where = f"{str(error.filename)!r}: " if error.filename is not None else ""
            _refuse(f"cannot use {where}{error.strerror}; check that it is there, and yours to read or write")
        _refuse(str(error) or type(error).__name__)
    if code == ExitCode.INTERRUPTED:  # typer turns Ctrl-C into this
        print("depthscope: interrupted", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _typed_value(error: Any, arguments: list[str]) -> str:
    """What was typed for the option that is refused, which typer does not always repeat: ", got '1e9'"."""
    names = getattr(getattr(error, "param", None), "opts", ())
    for argument, following in pairwise([*arguments, ""]):
        name, equals, value = argument.partition("=")
        typed = value if equals else following
        if name in names and (equals or typed):
            return "" if typed in error.format_message() else f", got {typed!r}"
    return ""


def _refuse(message: str) -> NoReturn:
    if message:
        print("depthscope:", visible(" ".join(message.split())), file=sys.stderr)
    sys.exit(ExitCode.MISTAKE)
