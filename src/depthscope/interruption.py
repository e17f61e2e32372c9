"""Ctrl-C and SIGTERM in the middle of several pieces of work: what is finished is kept.

A command runs inside of `stoppable`. Whatever makes a result in several pieces calls `attempt` for those without which
the result is still worth having: a signal ends that piece, later ones are not begun, and the command shows and saves
the rest. In Python, where nobody has opened `stoppable`, Ctrl-C is raised as ever.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import FrameType
from typing import TypeVar

from depthscope.exit_codes import Terminated

T = TypeVar("T")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C as `stoppable` raises it: code that raises a KeyboardInterrupt of its own does not raise this one."""


@dataclass
class Work:
    """What has become of a command's work."""

    stopped: KeyboardInterrupt | None = None
    missing: list[str] = field(default_factory=list)  # pieces that were asked for


_work: ContextVar[Work | None] = ContextVar("work", default=None)


@contextmanager
def stoppable() -> Iterator[Work]:
    """Inside, SIGINT and SIGTERM end the running piece of work; handlers that somebody has set stay."""
    work, handlers = Work(), {}
    token = _work.set(work)
    if threading.current_thread() is threading.main_thread():
        for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
            if signal.getsignal(number) is usual:
                handlers[number] = usual
                signal.signal(number, _raise)
    try:
        yield work
    finally:
        for number, usual in handlers.items():
            signal.signal(number, usual)
        _work.reset(token)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise Terminated if number == signal.SIGTERM else Interrupted


def attempt(what: str, piece: Callable[[], T]) -> T | None:
    """What a piece of work gives; None if a signal came meanwhile or before. `what` it is, in a few words."""
    work = _work.get()
    if work is None:
        return piece()
    if work.stopped is None:
        try:
            return piece()
        except KeyboardInterrupt as interrupt:
            work.stopped = interrupt.with_traceback(None)  # which holds all that the piece held
    work.missing.append(what)
    return None


def was_stopped() -> bool:
    """Whether a signal has ended a piece of this work: no other is to be begun."""
    work = _work.get()
    return work is not None and work.stopped is not None


def notes() -> list[str]:
    """For the notes of a result: what it lacks because the work was interrupted."""
    work = _work.get()
    return [f"interrupted: without {', '.join(work.missing)}"] if work is not None and work.missing else []


def is_signal(error: BaseException) -> bool:
    """Whether an exception is Ctrl-C or SIGTERM, and was not raised by some code itself; doubt counts as a signal."""
    if isinstance(error, Interrupted | Terminated):
        return True
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not _raise
