"""SIGINT and SIGTERM: noted, so that a run can save its work before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequest:
    """The signal that came, or None. What a shell expects as exit code is 128 + its number."""

    signal: signal.Signals | None = None


@contextmanager
def stop_on_signal() -> Iterator[StopRequest]:
    """Inside, a first SIGINT or SIGTERM is only noted; a second one does what it always does.

    One that was ignored before (a shell does that to SIGINT of what runs in the background) stays ignored.
    Outside the main thread Python gives no signals, and nothing is done.
    """
    request = StopRequest()
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
        before = {one: handler for one, handler in handlers.items() if handler is not signal.SIG_IGN}

    def put_back() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        put_back()

    try:
        for one in before:
            signal.signal(one, note)
        yield request
    finally:
        put_back()
