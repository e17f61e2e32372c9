"""What measures know of their own errors, and heads in the groups in which they are computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor

from depthscope.hooks import Head
from depthscope.measures import AttentionOperator, Bounded, together


class Bounds:
    """The largest bound of every measure that has one: over blocks, stations, heads and sequences."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}

    def note(self, name: str, found: Tensor | Bounded) -> Tensor:
        """The value; its bound is kept. Where there is no value there is no error."""
        if not isinstance(found, Bounded):
            return found
        errors = found.error[found.value.isfinite()]
        largest = errors.max().item() if errors.numel() else 0.0
        self.largest[name] = max(self.largest.get(name, 0.0), largest)
        return found.value


def in_groups(heads: Iterator[Head]) -> Iterator[Head]:
    """The same heads; those that are small are computed together."""
    waiting: deque[Head] = deque()

    def attention() -> Iterator[AttentionOperator]:
        for head in heads:
            waiting.append(head)
            yield head.attention

    for grouped in together(attention()):
        yield waiting.popleft()._replace(attention=grouped)
