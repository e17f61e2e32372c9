"""Tokens split by the length of the paths that they came on: one tensor for all lengths, the constant part first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Terms:
    """Σ_k A_k + b: what came on paths of each length k, and b, which does not depend on what entered.

    Lengths below `start` have nothing, so that a step through attention costs no copy: it only moves the start.
    """

    values: Tensor  # (1 + lengths, …): b, then A_start, A_start+1, …
    start: int = 0

    @classmethod
    def constant(cls, value: Tensor) -> Terms:
        """What does not depend on what entered."""
        return cls(value.unsqueeze(0))

    @classmethod
    def entering(cls, tokens: Tensor) -> Terms:
        """What enters: the path of length 0."""
        return cls(torch.stack([torch.zeros_like(tokens), tokens]))

    @property
    def end(self) -> int:
        """The first length after the last one that is here."""
        return self.start + len(self.values) - 1

    def map(self, linear: Callable[[Tensor], Tensor]) -> Terms:
        """The same linear map of every term; `linear` takes all of them at once."""
        return Terms(linear(self.values), self.start)

    def plus(self, constant: Tensor) -> Terms:
        """With something added that does not depend on what entered."""
        shape = torch.broadcast_shapes(self.values.shape[1:], constant.shape)
        return Terms(self.values.expand(-1, *shape).clone(), self.start).with_constant(constant)

    def with_constant(self, constant: Tensor) -> Terms:
        """`plus` where nobody else has these values: they are changed in place."""
        self.values[0] += constant
        return self

    def longer(self) -> Terms:
        """One step through attention: every path is one longer, and the constant part is constant."""
        return Terms(self.values, self.start + 1)

    def spanning(self, start: int, end: int) -> Terms:
        """The same, with zeros for those of these lengths that it does not have."""
        if len(self.values) == 1:
            before, after = 0, end - start
        else:
            before, after = self.start - start, end - self.end
        if before == after == 0:
            return Terms(self.values, start)
        first, last = (self.values.new_zeros(count, *self.values.shape[1:]) for count in (before, after))
        return Terms(torch.cat([self.values[:1], first, self.values[1:], last]), start)

    def whole(self) -> Tensor:
        """Their sum: the tokens themselves."""
        return self.values.sum(dim=0)


def together(combine: Callable[..., Tensor], *all_terms: Terms) -> Terms:
    """A linear map of several at once, such as their sum: `combine` takes one term of each."""
    full = [terms for terms in all_terms if len(terms.values) > 1]
    start = min((terms.start for terms in full), default=0)
    end = max((terms.end for terms in full), default=start)
    values = torch.vmap(combine)(*(terms.spanning(start, end).values for terms in all_terms))
    return Terms(values, start)


def added(a: Terms, b: Terms) -> Terms:
    """A + B, of the same shape: as `together`, without copies that only hold zeros where one is constant."""
    if len(b.values) == 1:
        return a.plus(b.values[0])
    return b.plus(a.values[0]) if len(a.values) == 1 else together(torch.add, a, b)


def with_axes(values: Tensor, axes: int) -> Tensor:
    """The terms (k, …) with as many axes after the first as another tensor has, so that both broadcast."""
    missing = axes - (values.ndim - 1)
    return values.reshape(values.shape[0], *[1] * missing, *values.shape[1:]) if missing > 0 else values
