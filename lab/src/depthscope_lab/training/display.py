"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, Self

from depthscope.naming import visible
from depthscope.progress import bar

_FORMS = {"loss": "loss {:.4f}", "lr": "lr {:.2g}", "token_similarity": "t_sim {:.3f}"}


class Display:
    """Hears how a run goes, and is open while the loop runs. This one only calls `progress` at each log."""

    def __init__(self, progress: Callable[[], object] = lambda: None):
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, message: str) -> None:
        """Something a person should know."""

    def begin(self, step: int, total: int) -> None:
        """The loop starts after `step` of `total` steps."""

    def logged(self, step: int, values: Mapping[str, float], seconds_left: float) -> None:
        """Every few steps."""
        self._progress()

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """After every look at the test data."""


class Terminal(Display):
    """On stderr: a bar with the newest numbers, and above it a line per evaluation.

    Where stderr is no terminal there is no bar; the newest numbers are then printed every 30 seconds.
    """

    _PAUSE = 30.0

    def __init__(self) -> None:
        from rich.console import Console

        super().__init__()
        self._console = Console(stderr=True)
        self._open = ExitStack()
        self._bar: Any = None
        self._task: Any = None
        self._total = 0
        self._newest: Mapping[str, float] = {}
        self._printed = time.monotonic()

    def __enter__(self) -> Self:
        self._bar = self._open.enter_context(bar())
        self._console = self._bar.console  # prints above the bar
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def say(self, message: str) -> None:
        self._console.print(visible(message), markup=False, highlight=False, soft_wrap=True)

    def begin(self, step: int, total: int) -> None:
        self._total = total
        self._task = self._bar.add_task(f"step {step}/{total}", total=total, completed=step)

    def logged(self, step: int, values: Mapping[str, float], seconds_left: float) -> None:
        self._newest = values
        line = f"{self._numbers(step)}  {timedelta(seconds=round(seconds_left))} left"
        self._bar.update(self._task, completed=step, description=line)
        if self._bar.disable and time.monotonic() - self._printed > self._PAUSE:
            self.say(line)
            self._printed = time.monotonic()

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        tested = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self.say(f"{self._numbers(step)}  {tested}")
        self._printed = time.monotonic()

    def _numbers(self, step: int) -> str:
        """step 220/330  loss 0.9135  lr 1e-04  312 images/s  t_sim 0.998"""
        parts = [f"step {step}/{self._total}"]
        for name, value in self._newest.items():
            if name.endswith("_per_second"):
                parts.append(f"{value:.0f} {name.removesuffix('_per_second')}/s")
            elif name in _FORMS:
                parts.append(_FORMS[name].format(value))
        return "  ".join(parts)
