"""The tokens that are followed through the whole model, some of each sequence, so that memory stays small."""

from __future__ import annotations

import torch
from torch import Tensor


def followed(tokens: Tensor, real: Tensor | None, most: int | None) -> Tensor:
    """Places (k) in the flattened tokens (batch·n): of each sequence at most `most` real tokens, evenly spaced.

    The first and the last real token are among them. None: all real tokens.
    """
    batch, n = tokens.shape[:2]
    rows = torch.ones(batch, n, dtype=torch.bool) if real is None else (real != 0).cpu()
    found = []
    for row in range(batch):
        places = rows[row].nonzero().flatten() + row * n
        if most is not None and len(places) > most:
            places = places[torch.linspace(0, len(places) - 1, most).round().long()]
        found.append(places)
    return torch.cat(found).to(tokens.device)


class Followed:
    """`followed`, which is the same at every station that has the same tokens: found once."""

    def __init__(self, most: int | None):
        self.most = most
        self._known: tuple[tuple[int, int], Tensor | None, Tensor] | None = None  # shape, mask, places

    def __call__(self, tokens: Tensor, real: Tensor | None) -> Tensor:
        shape = (tokens.shape[0], tokens.shape[1])
        if self._known is None or self._known[0] != shape or self._known[1] is not real:
            self._known = shape, real, followed(tokens, real, self.most)
        return self._known[2].to(tokens.device)


def taken(tokens: Tensor, places: Tensor) -> Tensor:
    """The tokens (batch, n, d) at these places, as a copy (k, d)."""
    return tokens.reshape(-1, tokens.shape[-1]).index_select(0, places)


class Means:
    """Means by name over batches, each batch with the weight of its tokens; nan is left out."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, str], tuple[float, float]] = {}

    def add(self, block: int, name: str, value: Tensor | float, weight: float) -> None:
        number = float(value)
        if number == number:
            total, count = self._sums.get((block, name), (0.0, 0.0))
            self._sums[block, name] = total + weight * number, count + weight

    def get(self, block: int, name: str) -> float:
        """nan if nothing was added."""
        total, count = self._sums.get((block, name), (0.0, 0.0))
        return total / count if count else float("nan")

    @property
    def names(self) -> set[str]:
        return {name for _, name in self._sums}
