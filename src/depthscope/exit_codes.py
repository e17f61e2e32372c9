"""How the program ends, for scripts and CI: every exit code of every command. docs/exit-codes.md has the table."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """A signal that ends the program gives 128 + its number, as in a shell."""

    DONE = 0
    DEFECT = 1  # of depthscope itself: Python's own code after a traceback, never given on purpose
    MISTAKE = 2  # something the user can mend: usage, names, files, memory, a missing extra
    GATE = 3  # all went well, and a gate that was asked for is closed: --fail-on, --stop-if, --strict
    NOT_FINITE = 4  # a training cannot go on: its loss, or what it would go on from, is nan or infinite
    INTERRUPTED = 130  # Ctrl-C; what was finished is shown, and work that can be continued was saved
    READER_GONE = 141  # whoever read the output has closed it, as `| head` does
    TERMINATED = 143  # SIGTERM, likewise


class Terminated(KeyboardInterrupt):
    """SIGTERM, where it is to end the work in order, as Ctrl-C does."""


def code_of(interrupt: KeyboardInterrupt) -> ExitCode:
    """How a program ends that was interrupted by Ctrl-C, or by SIGTERM."""
    return ExitCode.TERMINATED if isinstance(interrupt, Terminated) else ExitCode.INTERRUPTED
