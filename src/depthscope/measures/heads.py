"""Heads of a block that are small enough are computed together: one operation for all of them, not one each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from depthscope.measures.operators import AttentionOperator, DenseAttention, ScoredAttention

TOGETHER = 2**24  # entries of the matrices that are there at once; a larger head is streamed

T = TypeVar("T")


class HeadGroup:
    """Some heads of one block, all of one shape, with their matrices in one tensor."""

    def __init__(self, heads: list[AttentionOperator]):
        self.heads = heads
        self._known: dict[Any, Any] = {}

    @cached_property
    def matrices(self) -> Tensor:
        """(heads, batch, n, m)."""
        scored = [head for head in self.heads if isinstance(head, ScoredAttention) and not head.query.requires_grad]
        if len(scored) < len(self.heads):
            return torch.stack([head.dense() for head in self.heads])
        first = scored[0]
        whole = torch.empty((len(self.heads), *first.shape), dtype=first.query.dtype, device=first.query.device)
        for head, matrix in zip(scored, whole, strict=True):
            head.dense(out=matrix)
        return whole

    def once(self, compute: Callable[..., T], real: Tensor | None) -> T:
        """compute(matrices, mask) for all heads, computed once; the mask (batch, n) gets an axis for the heads."""
        if compute not in self._known:
            mask = None if real is None else real.unsqueeze(0).expand(len(self.heads), *real.shape)
            self._known[compute] = compute(self.matrices, mask)
        return self._known[compute]


@dataclass(frozen=True)
class GroupedAttention(DenseAttention):
    """One head of a group: its matrix is made with those of the others."""

    group: HeadGroup
    number: int

    def __init__(self, group: HeadGroup, number: int):
        object.__setattr__(self, "group", group)
        object.__setattr__(self, "number", number)

    @property  # type: ignore[misc]
    def matrix(self) -> Tensor:  # type: ignore[override]
        return self.group.matrices[self.number]

    @property
    def shape(self) -> torch.Size:
        return self.group.heads[self.number].shape


def is_streamed(attention: AttentionOperator) -> bool:
    """Whether its measures are taken from sweeps over its rows: its matrix is not there, or too large to copy."""
    return not isinstance(attention, DenseAttention) or attention.shape.numel() > TOGETHER


def scored(attention: AttentionOperator) -> ScoredAttention | None:
    """The queries and keys that attention is made of; None if only its matrix is there."""
    if isinstance(attention, GroupedAttention):
        attention = attention.group.heads[attention.number]
    return attention if isinstance(attention, ScoredAttention) else None


def together(heads: Iterable[AttentionOperator]) -> Iterator[AttentionOperator]:
    """The same heads in the same order, in groups whose matrices have at most `TOGETHER` entries.

    A head that is larger by itself comes as it is: if it is made of queries and keys, it has no matrix.
    """
    waiting: list[AttentionOperator] = []
    for head in heads:
        entries = head.shape.numel()
        if waiting and (head.shape != waiting[0].shape or (len(waiting) + 1) * entries > TOGETHER):
            yield from _as_group(waiting)
            waiting = []
        if entries > TOGETHER:
            yield head
        else:
            waiting.append(head)
    yield from _as_group(waiting)


def _as_group(heads: list[AttentionOperator]) -> Iterator[AttentionOperator]:
    if heads:
        group = HeadGroup(heads)
        yield from (GroupedAttention(group, number) for number in range(len(heads)))
