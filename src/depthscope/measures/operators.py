"""A head's attention as something that is applied to vectors: P @ x, P.T @ y, and P itself only if asked for.

The matrix of one head has n × m entries, which long contexts do not have the memory for. `ScoredAttention` keeps the
queries and keys that the matrix is made of, O((n + m)d), and makes some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

ROWS = 1024  # made at a time
TILE = 2**20  # entries that a sweep over the rows has at a time: they stay in the processor's caches
_WIDTHS = 8  # of the tiles of causal attention
_FEWEST = 16  # rows of a tile, however long they are: fewer would not be worth a matrix product


class Tile(NamedTuple):
    """The rows `first` … `last` − 1 of P, (…, last − first, seen): behind the first `seen` keys they are 0."""

    first: int
    last: int
    seen: int
    rows: Tensor
    scores: Tensor | None = None  # of the same shape, what the softmax read; −inf where a query may not look

    @property
    def peaks(self) -> Tensor | None:
        """The largest number that the softmax of each row read, (…, last − first); None if it is not known."""
        return None if self.scores is None else self.scores.amax(dim=-1)


class AttentionOperator(Protocol):
    """Row-stochastic attention (…, n, m), with n queries and m keys."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def T(self) -> TransposedAttention: ...

    def __matmul__(self, x: Tensor) -> Tensor:
        """x (…, m, k) → (…, n, k)."""
        ...

    def transposed_times(self, y: Tensor) -> Tensor:
        """Pᵀ y: y (…, n, k) → (…, m, k)."""
        ...

    def dense(self) -> Tensor:
        """The matrix, (…, n, m)."""
        ...

    def tiles(self) -> Iterator[Tile]:
        """P once, some rows at a time."""
        ...


def _check_rows(vectors: Tensor, rows: int) -> None:
    if vectors.ndim < 2 or vectors.shape[-2] != rows:
        raise ValueError(f"expected vectors as the columns of (…, {rows}, k), got shape {tuple(vectors.shape)}")


@dataclass(frozen=True)
class TransposedAttention:
    """Pᵀ, (…, m, n)."""

    of: AttentionOperator

    @property
    def shape(self) -> torch.Size:
        *batch, n, m = self.of.shape
        return torch.Size([*batch, m, n])

    @property
    def T(self) -> AttentionOperator:
        return self.of

    def __matmul__(self, y: Tensor) -> Tensor:
        """y (…, n, k) → (…, m, k)."""
        return self.of.transposed_times(y)

    def dense(self) -> Tensor:
        """The matrix, (…, m, n)."""
        return self.of.dense().mT


@dataclass(frozen=True)
class DenseAttention:
    """Attention whose matrix is there already: that of an eager implementation."""

    matrix: Tensor  # (…, n, m)

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    @property
    def T(self) -> TransposedAttention:
        return TransposedAttention(self)

    def __matmul__(self, x: Tensor) -> Tensor:
        _check_rows(x, self.shape[-1])
        return self.matrix @ x.to(self.matrix.dtype)

    def transposed_times(self, y: Tensor) -> Tensor:
        _check_rows(y, self.shape[-2])
        return self.matrix.mT @ y.to(self.matrix.dtype)

    def dense(self) -> Tensor:
        return self.matrix

    def tiles(self) -> Iterator[Tile]:
        for first, last in _pieces(self.shape):
            yield Tile(first, last, self.shape[-1], self.matrix[..., first:last, :])


@dataclass(frozen=True)
class ScoredAttention:
    """P = softmax(QKᵀ·scale + mask), made some rows at a time. Rows that may attend to nothing are nan."""

    query: Tensor  # (…, n, d)
    key: Tensor  # (…, m, d)
    scale: float
    mask: Tensor | None = None  # (…, n, m), broadcast: true where a query may look, or what is added to the scores
    causal: bool = False  # query i sees the keys 0 to i, as in `scaled_dot_product_attention`

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.query.shape[:-1], self.key.shape[-2]])

    @property
    def T(self) -> TransposedAttention:
        return TransposedAttention(self)

    def rows(self, first: int, last: int) -> Tensor:
        """The rows first … last − 1 of P, (…, last − first, m)."""
        return torch.softmax(self._scores(first, last, self.shape[-1]), dim=-1)

    def peaks(self) -> Tensor:
        """The largest number that the softmax of each row reads, (…, n), without the softmax."""
        m = self.shape[-1]
        return torch.cat([self._scores(a, b, m).amax(dim=-1) for a, b in self.pieces()], dim=-1)

    def tiles(self) -> Iterator[Tile]:
        m = self.shape[-1]
        step = max(m // _WIDTHS, 1)
        for first, last in _pieces(self.shape):
            # What no row of the tile may look at is not computed. In a few widths: memory is then used again.
            seen = min(-(-last // step) * step, m) if self.causal else m
            scores = self._scores(first, last, seen)
            yield Tile(first, last, seen, torch.softmax(scores, dim=-1), scores)

    def _scores(self, first: int, last: int, seen: int) -> Tensor:
        """What the softmax of these rows reads; −inf where a query may not look."""
        scores = self.query[..., first:last, :] * self.scale @ self.key[..., :seen, :].mT
        return self._allowed(scores, first, last, seen)

    def _allowed(self, scores: Tensor, first: int, last: int, seen: int) -> Tensor:
        """The scores with −∞ where a query may not look."""
        if self.causal and first < seen:  # keys before the first query are seen by all
            keys, queries = (torch.arange(first, end, device=scores.device) for end in (seen, last))
            scores[..., first:].masked_fill_(keys > queries[:, None], -torch.inf)
        if self.mask is not None:
            mask = self.mask.expand(self.shape)[..., first:last, :seen]
            scores = (
                scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
            )
        return scores

    def __matmul__(self, x: Tensor) -> Tensor:
        _check_rows(x, self.shape[-1])
        x = x.to(self.query.dtype)  # values of a half-precision model
        return torch.cat([self.rows(a, b) @ x for a, b in self.pieces()], dim=-2)

    def transposed_times(self, y: Tensor) -> Tensor:
        _check_rows(y, self.shape[-2])
        y = y.to(self.query.dtype)
        first, *others = self.pieces()
        total = self.rows(*first).mT @ y[..., slice(*first), :]
        for piece in others:
            total = total + self.rows(*piece).mT @ y[..., slice(*piece), :]
        return total

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            return self.rows(0, self.shape[-2])
        scores = self._allowed(torch.matmul(self.query * self.scale, self.key.mT, out=out), 0, *self.shape[-2:])
        return torch.softmax(scores, dim=-1, out=out)

    def pieces(self) -> list[tuple[int, int]]:
        """The rows that are made at a time, as (first, last + 1)."""
        n = max(self.shape[-2], 1)
        return [(first, min(first + ROWS, n)) for first in range(0, n, ROWS)]


def _pieces(shape: torch.Size) -> Iterator[tuple[int, int]]:
    """Rows from … to of the tiles of (…, n, m)."""
    n = shape[-2]
    entries = max(shape.numel() // max(n, 1), 1)  # of one row in every matrix of the batch
    rows = max(TILE // entries, _FEWEST)
    return ((first, min(first + rows, n)) for first in range(0, n, rows))
