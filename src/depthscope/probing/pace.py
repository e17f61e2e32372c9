"""How far the attention of a block is, while it is measured: a long head takes many sweeps over its rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from depthscope.hooks import Head
from depthscope.progress import Share, Steps, Tick, pulses

SWEEPS = 8  # that a long head is expected to take; the bar waits where it takes more, and jumps where it takes fewer


class Pace:
    """Tells a progress bar how much of a block is done, in heads and, within a head, in sweeps."""

    def __init__(self, progress: Tick | None):
        self._tell: Share | None = progress.inside if isinstance(progress, Steps) else None

    @contextmanager
    def of(self, head: Head) -> Iterator[None]:
        """While the measures of this head are taken."""
        if self._tell is None:
            yield
            return
        tell, sweeps = self._tell, 0

        def hear(share: float) -> None:
            nonlocal sweeps
            tell((head.number + min((sweeps + share) / SWEEPS, 1.0)) / head.among)
            sweeps += share == 1

        with pulses(hear):
            yield
        tell((head.number + 1) / head.among)
