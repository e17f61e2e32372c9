"""Ctrl-C at a chosen line of our own code, where Python could deliver it."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import depthscope

OURS = str(Path(depthscope.__file__).parent)


class LineCounter:
    """Counts the lines of depthscope that `act` runs, and raises KeyboardInterrupt at one of them."""

    def __init__(self, interrupt_at: int | None = None):
        self.lines, self.interrupt_at = 0, interrupt_at
        self.where = ""

    def run(self, act: Callable[[], object]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            act()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def _trace(self, frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.interrupt_at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._trace


class Places(LineCounter):
    """Counts, and notes which numbers each line of some files has had."""

    def __init__(self, *files: str):
        super().__init__()
        self.files = files
        self.found: dict[str, list[int]] = {}

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        traced = super()._trace(frame, event, argument)
        if traced is not None and event == "line" and frame.f_code.co_filename.endswith(self.files):
            self.found.setdefault(f"{frame.f_code.co_filename}:{frame.f_lineno}", []).append(self.lines)
        return traced
