"""The summaries of a pass, in a few large pieces of memory.

Hundreds of small tensors kept between a model's large ones would cut the free memory into pieces that no
activation fits into: the process would grow with depth although nothing large is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from depthscope.measures import TokenNorms
from depthscope.probing.catalogue import Summary

_ROWS = 128  # summaries per piece


class Ledger:
    """Takes summaries of one batch size one by one, and gives any of them back stacked."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []  # (rows, fields, batch)
        self._count = 0
        self._tokens, self._epsilon = 0, 0.0

    def write(self, summary: Summary) -> int:
        """Copies a summary and returns its row."""
        vectors = [
            vector
            for norms in (summary.norms, summary.directions, summary.ordinary)
            for vector in (norms.count, norms.mean_norm, norms.deviation_norm)
        ]
        vectors += [summary.largest_norm, summary.outliers]
        self._tokens, self._epsilon = summary.norms.tokens, summary.norms.epsilon
        if self._count % _ROWS == 0:
            shape = (_ROWS, len(vectors), *vectors[0].shape)
            self._pieces.append(torch.empty(shape, dtype=torch.float64, device=vectors[0].device))
        torch.stack(vectors, out=self._pieces[-1][self._count % _ROWS])
        self._count += 1
        return self._count - 1

    def read(self, rows: list[int]) -> Summary:
        """The summaries of these rows, each quantity (rows, batch)."""
        fields = torch.cat(self._pieces)[rows].unbind(dim=1)
        norms, directions, ordinary = (
            TokenNorms(self._tokens, fields[i], fields[i + 1], fields[i + 2], self._epsilon) for i in (0, 3, 6)
        )
        return Summary(norms, directions, ordinary, largest_norm=fields[9], outliers=fields[10])
