"""The numbers of a pass, in a few large pieces of memory.

Hundreds of small tensors kept between a model's large ones would cut the free memory into pieces that no
activation fits into: the process would grow with depth although nothing large is kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures import PARTS, Summary, TokenNorms
from depthscope.probing.sweep import FIELDS

_ROWS = 128  # sweeps per piece


class Kind(NamedTuple):
    """What the token matrices of one ledger have in common: the towers of a model may differ in it."""

    batch: int
    tokens: int
    dtype: torch.dtype
    device: torch.device


class Ledger:
    """Has a row (fields, batch) for the sweep over each station of one kind, and gives any of them back stacked."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._pieces: list[Tensor] = []  # (rows, fields, batch), where the tokens are
        self._count = 0
        self._read: Tensor | None = None  # all of them, on the CPU

    def new_row(self) -> int:
        """Room for one more sweep."""
        if self._count % _ROWS == 0:
            shape = (_ROWS, len(FIELDS), self.kind.batch)
            self._pieces.append(torch.empty(shape, dtype=torch.float64, device=self.kind.device))
        self._count += 1
        self._read = None
        return self._count - 1

    def row(self, number: int) -> Tensor:
        """One sweep, where the tokens are, (fields, batch)."""
        return self._pieces[number // _ROWS][number % _ROWS]

    def norms(self, number: int) -> TokenNorms:
        """Of the tokens of one sweep, where they are."""
        row = self.row(number)
        return self._token_norms(row[0], row[1], row[2])

    def rows(self, numbers: list[int]) -> Tensor:
        """These sweeps on the CPU, (rows, fields, batch): a device is asked once for all of them."""
        if self._read is None:
            self._read = torch.cat(self._pieces)[: self._count].cpu()
        return self._read[numbers]

    def read(self, numbers: list[int]) -> Summary:
        """The summaries of these sweeps, each quantity (rows, batch)."""
        rows = self.rows(numbers)
        fields = dict(zip(FIELDS, rows.unbind(dim=1), strict=True))
        parts: dict[str, TokenNorms | Tensor] = {}
        for name in PARTS:
            three = [field for full_name, field in fields.items() if full_name.startswith(f"{name}.")]
            parts[name] = self._token_norms(*three) if three else fields[name]
        return Summary(parts)

    def _token_norms(self, count: Tensor, mean_norm: Tensor, deviation_norm: Tensor) -> TokenNorms:
        epsilon = torch.finfo(self.kind.dtype).eps
        return TokenNorms(self.kind.tokens, count, mean_norm, deviation_norm, epsilon)
