"""The command line: one thin file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from depthscope.exit_codes import ExitCode

__all__ = ["main"]


def main() -> None:
    """Runs the program. Ctrl-C ends it in one line also while it is being imported, and a second one adds nothing."""
    own = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else somebody else's, or ignored
    if own:
        signal.signal(signal.SIGINT, _leave)
    try:
        from depthscope.cli.app import main as run
    except ValueError as error:  # two packages have a command of one name
        print(f"depthscope: {error}", file=sys.stderr)
        sys.exit(ExitCode.MISTAKE)
    try:
        if own:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        run()
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != ExitCode.INTERRUPTED:
            raise
        if own:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # while libraries' exit functions run
        sys.exit(ExitCode.INTERRUPTED)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """At once: there is nothing to undo yet, and a library that is being imported may swallow an exception."""
    os.write(2, b"depthscope: interrupted\n")
    os._exit(ExitCode.INTERRUPTED)
