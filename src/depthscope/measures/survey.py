"""What one sweep over the rows of an attention matrix finds out; the matrix itself is never there.

A sweep makes P once, some rows at a time (`AttentionOperator.tiles`), at the cost of one attention pass; memory is
O(n). Attention is that of one head, (batch, n, m); `real` (batch, n) is true for real tokens: rows and columns of
padding are left out.

Rows may be nearly equal, or one of them far from all others (under a sink). So the rows of a tile are compared with the
first of them, and tiles with each other by their means (Chan, Golub & LeVeque 1983): a float32 difference is exact
where rows are nearly equal, one far row costs its own tile alone some digits, and equal rows have no spread at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures.operators import AttentionOperator, Tile


@dataclass(frozen=True)
class Survey:
    """What one sweep finds out. All but `peaks`, `triangular` and `real` are float64."""

    mean_row: Tensor  # p̄ (batch, m): the attention that each token draws
    spread: Tensor  # ‖Π⊥P‖_F (batch,); nan where an entry is not finite, or no token real
    entropy: Tensor  # (batch,): the mean over the real rows of −Σ_j p_ij log p_ij; nan where spread is
    peaks: Tensor | None  # (batch, n): the largest number that the softmax of each row read; None if it was not seen
    diagonal: Tensor  # (batch, n), of a square matrix
    triangular: Tensor  # (batch,), bool: whether no token attends to a later one
    count: Tensor  # (batch,)
    real: Tensor  # (batch, n), bool
    dtype: torch.dtype  # of the rows


def sweep(attention: AttentionOperator, real: Tensor | None) -> Iterator[Tile]:
    """P once, with rows and, of a square P, columns of padding set to 0."""
    n, m = attention.shape[-2:]
    for tile in attention.tiles():
        yield tile if real is None else _without_padding(tile, real, n == m)


def _without_padding(tile: Tile, real: Tensor, square: bool) -> Tile:
    kept = real[..., tile.first : tile.last, None]
    kept = kept & real[..., None, : tile.seen] if square else kept
    return tile._replace(rows=torch.where(kept, tile.rows, 0.0))


def survey(attention: AttentionOperator, real: Tensor | None = None) -> Survey:
    """One sweep; takes cross-attention too, which has no diagonal."""
    found: _Sums | None = None
    for tile in sweep(attention, None):
        if found is None:
            found = _Sums(attention, tile, real)
        found.add(tile)
    if found is None:
        raise ValueError(f"expected attention with at least one query, got shape {tuple(attention.shape)}")
    return found.finished()


class _Sums:
    """What a survey adds up, tile by tile."""

    def __init__(self, attention: AttentionOperator, like: Tile, real: Tensor | None):
        *batch, n, m = attention.shape
        device, double = like.rows.device, torch.float64
        self.dtype, self.masked, self.square = like.rows.dtype, real is not None, n == m
        self.narrow = bool(getattr(attention, "causal", False))  # nobody looks ahead
        self.real = torch.ones((*batch, n), dtype=torch.bool, device=device) if real is None else real.to(device)
        self.count = torch.zeros(batch, dtype=double, device=device)  # of real rows so far
        self.mean = torch.zeros((*batch, m), dtype=double, device=device)  # of those
        self.squares = torch.zeros(batch, dtype=double, device=device)  # of their deviations from it
        self.entropy = torch.zeros(batch, dtype=double, device=device)
        self.peaks = None if like.scores is None else torch.empty((*batch, n), dtype=self.dtype, device=device)
        self.triangular = torch.full(batch, self.square, dtype=torch.bool, device=device)
        self.diagonal = torch.zeros((*batch, n), dtype=double, device=device)

    def add(self, tile: Tile) -> None:
        here = self.real[..., tile.first : tile.last]  # (…, rows)
        if self.peaks is not None and (peaks := tile.peaks) is not None:
            self.peaks[..., tile.first : tile.last] = peaks
        of_rows = row_entropies(tile)  # of whole rows, also where a model looks at what the user calls padding
        self.entropy += (torch.where(here, of_rows, 0.0) if self.masked else of_rows).sum(dim=-1, dtype=torch.float64)
        if self.masked:
            tile = _without_padding(tile, self.real, self.square)
        if self.square:
            self._look_at_diagonal(tile)
        self._add_rows(tile, here)

    def _look_at_diagonal(self, tile: Tile) -> None:
        rows = tile.rows
        self.diagonal[..., tile.first : tile.last] = rows.diagonal(offset=tile.first, dim1=-2, dim2=-1)
        if not self.narrow and bool(self.triangular.any()):
            self.triangular = self.triangular & ~rows[..., tile.first :].triu(1).flatten(-2).any(dim=-1)

    def _add_rows(self, tile: Tile, here: Tensor) -> None:
        """Joins the mean and the squares of the tile's rows to those before."""
        rows = tile.rows
        first = rows[..., :1, :]
        if self.masked:
            index = here.int().argmax(dim=-1)[..., None, None]
            first = rows.gather(-2, index.expand(*here.shape[:-1], 1, rows.shape[-1]))
        rows = rows - first
        if self.masked:
            rows = torch.where(here.unsqueeze(-1), rows, 0.0)
        count = here.sum(dim=-1).double()
        offset = rows.sum(dim=-2).double() / count.clamp(min=1).unsqueeze(-1)
        squares = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64).square().sum(dim=-1)  # none underflows
        squares = torch.where(squares == 0, 0.0, squares - count * offset.square().sum(dim=-1)).clamp(min=0)

        total = (self.count + count).clamp(min=1)
        mean = first.squeeze(-2).double() + offset
        apart = torch.where((count > 0).unsqueeze(-1), mean - self.mean[..., : tile.seen], 0.0)
        self.mean[..., : tile.seen] += apart * (count / total).unsqueeze(-1)
        self.squares += squares + self.count * count / total * apart.square().sum(dim=-1)
        self.count += count

    def finished(self) -> Survey:
        usable = (self.count > 0) & self.squares.isfinite()
        spread = torch.where(usable, self.squares.sqrt(), torch.nan)
        entropy = torch.where(usable, self.entropy / self.count, torch.nan)
        return Survey(
            self.mean,
            spread,
            entropy,
            self.peaks,
            self.diagonal,
            self.triangular,
            self.count,
            self.real,
            self.dtype,
        )


def row_entropies(tile: Tile) -> Tensor:
    """−Σ_j p_ij log p_ij of the rows of a tile, (…, rows).

    Where the scores s are at hand, as Σ_j p_ij (t_i − s_ij) + log Z_i with the largest score t_i, whose p_ij is 1/Z_i:
    all of it is positive, and there is one logarithm in a row, not one in every entry.
    """
    rows, scores, peaks = tile.rows, tile.scores, tile.peaks
    if scores is None or peaks is None:
        return torch.special.entr(rows).sum(dim=-1, dtype=torch.float64)
    below = (peaks.unsqueeze(-1) - scores).masked_fill_(rows == 0, 0.0)  # where a query may not look: 0 · ∞
    spent = (rows.unsqueeze(-2) @ below.unsqueeze(-1)).squeeze(-1).squeeze(-1)
    return spent.double() - rows.amax(dim=-1).double().log()
