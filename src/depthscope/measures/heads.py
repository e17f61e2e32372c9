"""Heads of a block that are small enough are computed together: one operation for all of them, not one each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        return torch.stack([head.dense() for head in self.heads])

    def once(self, compute: Callable[..., T], real: Tensor | None) -> T:
        """compute(matrices, mask) for all heads, computed once; the mask (batch, n) gets an axis for the heads."""
        if compute not in self._known:
            mask = None if real is None else real.unsqueeze(0).expand(len(self.heads), *real.shape)
            self._known[compute] = compute(self.matrices, mask)
        return self._known[compute]


class GroupedAttention(DenseAttention):
    """One head of a group: its matrix is made with those of the others."""

    def __init__(self, group: HeadGroup, number: int):
        self.group, self.number = group, number

    @property
    def shape(self) -> torch.Size:
        return self.group.heads[self.number].shape

    def dense(self) -> Tensor:
        return self.group.matrices[self.number]


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

    def grouped() -> Iterator[AttentionOperator]:
        group = HeadGroup(waiting.copy())
        waiting.clear()
        return (GroupedAttention(group, number) for number in range(len(group.heads)))

    for head in heads:
        entries = head.shape.numel()
        if waiting and (head.shape != waiting[0].shape or (len(waiting) + 1) * entries > TOGETHER):
            yield from grouped()
        if entries > TOGETHER:
            yield head
        else:
            waiting.append(head)
    yield from grouped()
