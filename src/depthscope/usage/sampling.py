"""The tokens that are compared block by block, a few of each sequence so that memory stays small; means over them."""

from __future__ import annotations

import torch
from torch import Tensor

from depthscope.transfers import fetched


class SampledTokens:
    """Takes, of each sequence, at most `most` real tokens, evenly spaced, the first and the last among them; None: all.

    Their places are found once for all stations that have the same tokens.
    """

    def __init__(self, most: int | None):
        self.most = most
        self._known: tuple[torch.Size, Tensor | None, Tensor] | None = None  # shape, mask, places

    def places(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        """Where they are in the flattened tokens (batch·n): (k)."""
        shape = tokens.shape[:2]
        if self._known is None or self._known[0] != shape or self._known[1] is not real:
            there = torch.ones(shape, dtype=torch.bool) if real is None else (real != 0).cpu()
            found = []
            for row in range(shape[0]):
                places = there[row].nonzero().flatten() + row * shape[1]
                if self.most is not None and len(places) > self.most:
                    places = places[torch.linspace(0, len(places) - 1, self.most).round().long()]
                found.append(places)
            self._known = shape, real, torch.cat(found)
        if self._known[2].device != tokens.device:
            self._known = *self._known[:2], self._known[2].to(tokens.device)
        return self._known[2]

    def of(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        """The tokens themselves (batch, n, d) as a copy (k, d): a model may write into its own."""
        return tokens.reshape(-1, tokens.shape[-1]).index_select(0, self.places(tokens, real))


class Means:
    """Means by block and name over batches, each with its weight; nan is left out, and what was never added is nan."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], tuple[float, float]] = {}
        self._waiting: list[tuple[int, str, Tensor, float]] = []  # what was added and is still where it was computed

    def add(self, block: int, name: str, value: Tensor, weight: float) -> None:
        self._waiting.append((block, name, value, weight))

    def get(self, block: int, name: str) -> float:
        total, count = self._known().get((block, name), (0.0, 0.0))
        return total / count if count else float("nan")

    @property
    def names(self) -> set[str]:
        return {name for _, name in self._known()}

    def _known(self) -> dict[tuple[int, str], tuple[float, float]]:
        """The sums, with all that was added since they were asked for: one transfer."""
        waiting, self._waiting = self._waiting, []
        numbers = fetched([value for *_, value, _ in waiting])
        for (block, name, _, weight), found in zip(waiting, numbers, strict=True):
            if not found.isnan():
                total, count = self._sums.get((block, name), (0.0, 0.0))
                self._sums[block, name] = total + weight * found.item(), count + weight
        return self._sums
