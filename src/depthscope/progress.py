"""How far long work has come: the one way in which code tells it, and the one bar that people see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

Tick = Callable[[], object]  # called after each piece of work
Share = Callable[[float], object]  # called with the share of the work that is done, 0 to 1


class Steps:
    """Counts pieces of work."""

    def __init__(self, show: Share):
        self._show, self._done = show, 0  # `show` is given the pieces that are done

    def __call__(self) -> None:
        self._done += 1
        self._show(self._done)


@contextmanager
def bar(*columns: Any, shown: bool = True) -> Iterator[Progress]:
    """rich's progress display on stderr, on a terminal only; it goes away when all is done.

    `columns` are rich's; without any, its own.
    """
    from rich.console import Console
    from rich.progress import Progress

    on = shown and sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not on) as display:
        yield display
