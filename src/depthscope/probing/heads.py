"""The heads of a block as measures are given them, and how far they are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from depthscope.hooks import Head
from depthscope.measures import AttentionOperator, together
from depthscope.measures.heads import scored
from depthscope.progress import Steps, Tick, pulses

SWEEPS = 8  # that a long head is expected to take; the bar waits where it takes more, and jumps where it takes fewer


def parts_of_head(head: Head, values: Tensor | None) -> dict[str, Any]:
    """What a measure may be given of one head, by name."""
    parts = {"attention": lambda: head.attention, "matrix": head.attention.dense}
    if head.scores is not None or scored(head.attention) is not None:
        parts |= {"scores": lambda: head.scores}
    return parts if values is None else parts | {"values": lambda: values[:, head.group]}


def in_groups(heads: Iterator[Head]) -> Iterator[Head]:
    """The same heads; those that are small are computed together."""
    waiting: deque[Head] = deque()

    def attention() -> Iterator[AttentionOperator]:
        for head in heads:
            waiting.append(head)
            yield head.attention

    for grouped in together(attention()):
        yield waiting.popleft()._replace(attention=grouped)


@contextmanager
def progress_of(head: Head, progress: Tick | None) -> Iterator[None]:
    """Tells a progress bar how much of a block is done, in heads and, within a head, in sweeps over its rows."""
    if not isinstance(progress, Steps):
        yield
        return
    tell, sweeps = progress.inside, 0

    def hear(share: float) -> None:
        nonlocal sweeps
        tell((head.number + min((sweeps + share) / SWEEPS, 1.0)) / head.among)
        sweeps += share == 1

    with pulses(hear):
        yield
    tell((head.number + 1) / head.among)
