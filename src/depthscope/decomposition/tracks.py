"""Tokens split by the length of the paths that they came on: one tensor for all lengths, and the constant part first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tracks:
    """Σ_k A_k + b: what came on paths of each length k, and b, which does not depend on what entered.

    Lengths below `start` have nothing, so that a step through attention costs no copy: it only moves the start.
    """

    values: Tensor  # (1 + lengths, …): b, then A_start, A_start+1, …
    start: int = 0

    @classmethod
    def constant(cls, value: Tensor) -> Tracks:
        """What does not depend on what entered."""
        return cls(value.unsqueeze(0))

    @classmethod
    def entering(cls, tokens: Tensor) -> Tracks:
        """What enters: the path of length 0."""
        return cls(torch.stack([torch.zeros_like(tokens), tokens]))

    @property
    def end(self) -> int:
        """The first length behind the last one that is here."""
        return self.start + len(self.values) - 1

    def map(self, linear: Callable[[Tensor], Tensor]) -> Tracks:
        """The same linear map of every track; `linear` takes all of them at once."""
        return Tracks(linear(self.values), self.start)

    def plus(self, constant: Tensor) -> Tracks:
        """With something added that does not depend on what entered."""
        shape = torch.broadcast_shapes(self.values.shape[1:], constant.shape)
        values = self.values.expand(-1, *shape).clone() if shape != self.values.shape[1:] else self.values.clone()
        values[0] = values[0] + constant
        return Tracks(values, self.start)

    def longer(self) -> Tracks:
        """One step through attention: every path is one longer, and the constant part is constant."""
        return Tracks(self.values, self.start + 1)

    def spanning(self, start: int, end: int) -> Tracks:
        """The same with room for these lengths, where there is nothing."""
        if len(self.values) == 1:
            before, after = 0, end - start
        else:
            before, after = self.start - start, end - self.end
        if before == after == 0:
            return Tracks(self.values, start)
        room = [self.values.new_zeros(count, *self.values.shape[1:]) for count in (before, after)]
        return Tracks(torch.cat([self.values[:1], room[0], self.values[1:], room[1]]), start)

    def whole(self) -> Tensor:
        """Their sum: the tokens themselves."""
        return self.values.sum(dim=0)


def aligned(*all_tracks: Tracks) -> list[Tracks]:
    """The same lengths in each."""
    full = [tracks for tracks in all_tracks if len(tracks.values) > 1]
    start = min((tracks.start for tracks in full), default=0)
    end = max((tracks.end for tracks in full), default=start)
    return [tracks.spanning(start, end) for tracks in all_tracks]


def together(combine: Callable[..., Tensor], *all_tracks: Tracks) -> Tracks:
    """A linear map of several at once, such as their sum: `combine` takes one track of each."""
    same = aligned(*all_tracks)
    return Tracks(torch.vmap(combine)(*(tracks.values for tracks in same)), same[0].start)


def added(a: Tracks, b: Tracks) -> Tracks:
    """A + B, of the same shape."""
    if (a.start, a.end) == (b.start, b.end):
        return Tracks(a.values + b.values, a.start)
    return together(torch.add, a, b)


def with_axes(values: Tensor, axes: int) -> Tensor:
    """The tracks (k, …) with as many axes behind the first as another tensor has, so that both broadcast."""
    missing = axes - (values.ndim - 1)
    return values.reshape(values.shape[0], *[1] * missing, *values.shape[1:]) if missing > 0 else values
