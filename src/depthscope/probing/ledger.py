"""The summaries of a pass, in a few large pieces of memory.

Hundreds of small tensors kept between a model's large ones would cut the free memory into pieces that no
activation fits into: the process would grow with depth although nothing large is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures import Summary, TokenNorms

_ROWS = 128  # summaries per piece


class Kind(NamedTuple):
    """What the token matrices of one ledger have in common: the towers of a model may differ in it."""

    batch: int
    tokens: int
    dtype: torch.dtype


class Ledger:
    """Takes summaries of one kind one by one, all with the same parts, and gives any of them back stacked."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []  # (rows, fields, batch)
        self._count = 0
        self._layout: dict[str, tuple[int, float] | None] = {}  # part → (tokens, ε) of norms; None: a plain number

    def write(self, summary: Summary) -> int:
        """Copies a summary and returns its row."""
        vectors: list[Tensor] = []
        for name, part in summary.parts.items():
            if isinstance(part, TokenNorms):
                self._layout[name] = (part.tokens, part.epsilon)
                vectors += [part.count, part.mean_norm, part.deviation_norm]
            else:
                self._layout[name] = None
                vectors.append(part)
        if self._count % _ROWS == 0:
            shape = (_ROWS, len(vectors), *vectors[0].shape)
            self._pieces.append(torch.empty(shape, dtype=torch.float64, device=vectors[0].device))
        torch.stack(vectors, out=self._pieces[-1][self._count % _ROWS])
        self._count += 1
        return self._count - 1

    def read(self, rows: list[int]) -> Summary:
        """The summaries of these rows, each quantity (rows, batch)."""
        fields = iter(torch.cat(self._pieces)[rows].unbind(dim=1))
        parts: dict[str, TokenNorms | Tensor] = {}
        for name, norms in self._layout.items():
            if norms is None:
                parts[name] = next(fields)
            else:
                tokens, epsilon = norms
                parts[name] = TokenNorms(tokens, next(fields), next(fields), next(fields), epsilon)
        return Summary(parts)
