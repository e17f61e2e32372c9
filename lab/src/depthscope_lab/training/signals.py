"""SIGINT and SIGTERM: noted, so that a run can save its work before it ends; and the end of the parent process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


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
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before: dict[signal.Signals, Any] = {}

    def put_back() -> None:
        for one, handler in before.items():
            signal.signal(one, handler)

    def note(number: int, _frame: FrameType | None) -> None:
        request.signal = signal.Signals(number)
        put_back()

    for one in _SIGNALS:
        if (handler := signal.getsignal(one)) is not signal.SIG_IGN:
            before[one] = handler
    try:
        for one in before:
            signal.signal(one, note)
        yield request
    finally:
        put_back()


def end_with_stdin() -> None:
    """SIGTERM to this process once standard input ends: a pipe that our parent holds, and the kernel closes with it."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()
