"""A head's attention as something that is applied to vectors: P @ x, P.T @ y, and P itself only if asked for.

The matrix of one head has n × m entries, which long contexts do not have the memory for. `ScoredAttention` keeps the
queries and keys that the matrix is made of, O((n + m)d), and makes some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

ROWS = 1024  # made at a time


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
        return torch.softmax(self.scores(first, last), dim=-1)

    def scores(self, first: int, last: int) -> Tensor:
        """What the softmax of these rows reads, (…, last − first, m); −inf where a query may not look."""
        scores = self.query[..., first:last, :] @ self.key.mT * self.scale
        if self.causal:
            seen = torch.arange(self.key.shape[-2], device=scores.device)
            allowed = seen <= torch.arange(first, last, device=scores.device)[:, None]
            scores = scores.masked_fill(~allowed, -torch.inf)
        if self.mask is not None:
            mask = self.mask.expand(self.shape)[..., first:last, :]
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

    def dense(self) -> Tensor:
        return self.rows(0, self.shape[-2])

    def pieces(self) -> list[tuple[int, int]]:
        """The rows that are made at a time, as (first, last + 1)."""
        n = max(self.shape[-2], 1)
        return [(first, min(first + ROWS, n)) for first in range(0, n, ROWS)]
