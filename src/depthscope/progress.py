"""How far long work has come: the ways in which code tells it, and the one bar that people see.

A piece of work that takes minutes tells how far it is itself: its innermost loop calls `pulse`, whoever knows what it
is a part of listens (`pulses`), and hands the share of the piece to `Steps.inside`, if somebody watches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress

Tick = Callable[[], object]  # called after each piece of work
Share = Callable[[float], object]  # called with the share of the work that is done, 0 to 1
_listener: ContextVar[Share | None] = ContextVar("listener", default=None)


class Steps:
    """Counts pieces of work, and shows how much of the running piece is done."""

    def __init__(self, show: Share):
        self._show, self._done = show, 0  # `show` is given the pieces that are done, 2.5 for two and a half

    def __call__(self) -> None:
        self._done += 1
        self._show(self._done)

    def inside(self, share: float) -> None:
        """So much of the running piece is done, 0 to 1."""
        self._show(self._done + share)


def pulse(share: float) -> None:
    """Says how far a loop has come, 0 to 1, to whoever listens in this thread."""
    listener = _listener.get()
    if listener is not None:
        listener(share)


@contextmanager
def pulses(listener: Share) -> Iterator[None]:
    """While it is open, `listener` is called with every pulse."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


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
