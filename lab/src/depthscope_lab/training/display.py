"""What a person sees of a run: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Self

from depthscope.naming import visible
from depthscope.progress import bar


class Display:
    """Is told how a run goes, and is open while the loop runs. This one shows nothing, and calls `told` at each log."""

    def __init__(self, told: Callable[[], object] = lambda: None):
        self._told = told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, message: str) -> None:
        """Something a person should know."""

    def begin(self, step: int, total: int) -> None:
        """The loop starts after `step` of `total` steps."""

    def logged(self, step: int, values: Mapping[str, float], seconds_left: float) -> None:
        """Every few steps."""
        self._told()

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
        from rich.progress import BarColumn, TextColumn

        self._bar = self._open.enter_context(bar(BarColumn(bar_width=20), TextColumn("{task.description}")))
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
        line = f"{_numbers(step, self._total, values)}  {_duration(seconds_left)} left"
        self._bar.update(self._task, completed=step, description=line)
        if self._bar.disable and time.monotonic() - self._printed > self._PAUSE:
            self.say(line)
            self._printed = time.monotonic()

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        tested = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self.say(f"{_numbers(step, self._total, self._newest)}  {tested}")
        self._printed = time.monotonic()


def _numbers(step: int, total: int, values: Mapping[str, float]) -> str:
    """step 220/330  loss 0.9135  lr 1e-04  312 images/s  t_sim 0.998"""
    parts = [f"step {step}/{total}"]
    for name, value in values.items():
        if name == "loss":
            parts.append(f"loss {value:.4f}")
        elif name == "lr":
            parts.append(f"lr {value:.2g}")
        elif name.endswith("_per_second"):
            parts.append(f"{value:.0f} {name.removesuffix('_per_second')}/s")
        elif name == "token_similarity":
            parts.append(f"t_sim {value:.3f}")
    return "  ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
