"""The command line: one thin file per command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import sys

from depthscope.exit_codes import ExitCode

__all__ = ["main"]


def main() -> None:
    """Runs the program. Ctrl-C ends it in one line also while it is being imported."""
    try:
        from depthscope.cli.app import main as run
    except ValueError as error:  # two packages have a command of one name
        print(f"depthscope: {error}", file=sys.stderr)
        sys.exit(ExitCode.MISTAKE)
    except KeyboardInterrupt:
        print("depthscope: interrupted", file=sys.stderr)
        sys.exit(ExitCode.INTERRUPTED)
    run()
