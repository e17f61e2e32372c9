"""How a command ends that was told to: what was finished is shown and saved, then comes one line, and the code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from depthscope.exit_codes import code_of
from depthscope.interruption import stoppable


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Around a whole command: Ctrl-C and SIGTERM end its running piece of work, and then the program."""
    with stoppable() as work:
        try:
            yield
        except KeyboardInterrupt as interrupt:  # nothing was finished, or once more
            work.stopped = interrupt
        except typer.Exit:
            if work.stopped is None:
                raise
    if work.stopped is not None:
        without = f", without {', '.join(work.missing)}; what was finished is there" if work.missing else ""
        print(f"depthscope: interrupted{without}", file=sys.stderr)
        sys.exit(code_of(work.stopped))
