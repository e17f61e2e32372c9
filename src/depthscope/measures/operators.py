"""A head's attention as something that is applied to vectors: P @ x, or P itself, `dense()`, only if asked for.

The matrix of one head has n × m entries, which long contexts do not have the memory for. `ScoredAttention` keeps the
queries and keys that the matrix is made of, O((n + m)d), and makes some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STREAMED = 2**24  # entries of a matrix above which it is not made, or copied: its measures are taken row by row
TILE = 2**20  # entries that a sweep over the rows has at a time: they stay in the processor's caches
_WIDTHS = 8  # of the tiles of causal attention
_FEWEST = 16  # rows of a tile, however long they are: fewer would not be worth a matrix product


class Tile(NamedTuple):
    """The rows `first` … `last` − 1 of P, (…, last − first, seen): after the first `seen` keys they are 0."""

    first: int
    last: int
    seen: int
    rows: Tensor
    scores: Tensor | None = None  # of the same shape, what the softmax read; −inf where a query may not look

    @property
    def peaks(self) -> Tensor | None:
        """The largest number that the softmax of each row read, (…, last − first); None if it is not known."""
        return None if self.scores is None else self.scores.amax(dim=-1)


class AttentionOperator:
    """Row-stochastic attention (…, n, m), with n queries and m keys."""

    @property
    def shape(self) -> torch.Size:
        raise NotImplementedError

    @property
    def is_streamed(self) -> bool:
        """Whether its measures are taken from sweeps over its rows."""
        return self.shape.numel() > STREAMED

    def dense(self) -> Tensor:
        """The matrix, (…, n, m)."""
        raise NotImplementedError

    def tile(self, first: int, last: int) -> Tile:
        """The rows first … last − 1."""
        raise NotImplementedError

    def tiles(self) -> Iterator[Tile]:
        """P once, some rows at a time."""
        n = self.shape[-2]
        entries = max(self.shape.numel() // max(n, 1), 1)  # of one row in every matrix of the batch
        rows = max(TILE // entries, _FEWEST)
        for first in range(0, n, rows):
            yield self.tile(first, min(first + rows, n))

    def __matmul__(self, x: Tensor) -> Tensor:
        """x (…, m, k) → (…, n, k), in the wider precision of the two."""
        n, m = self.shape[-2:]
        if x.ndim < 2 or x.shape[-2] != m:
            raise ValueError(f"expected vectors as the columns of (…, {m}, k), got shape {tuple(x.shape)}")
        product: Tensor | None = None
        for tile in self.tiles():
            wide = torch.promote_types(tile.rows.dtype, x.dtype)
            rows = tile.rows.to(wide) @ x[..., : tile.seen, :].to(wide)
            if product is None:  # written where it stays: small tensors between tiles break up the memory they use
                product = rows.new_empty((*rows.shape[:-2], n, x.shape[-1]))
            product[..., tile.first : tile.last, :] = rows
        assert product is not None
        return product


@dataclass(frozen=True)
class DenseAttention(AttentionOperator):
    """Attention whose matrix is there already: that of an eager implementation."""

    matrix: Tensor  # (…, n, m)

    @property
    def shape(self) -> torch.Size:
        return self.matrix.shape

    def dense(self) -> Tensor:
        return self.matrix

    def tile(self, first: int, last: int) -> Tile:
        return Tile(first, last, self.shape[-1], self.matrix[..., first:last, :])


@dataclass(frozen=True)
class ScoredAttention(AttentionOperator):
    """P = softmax(QKᵀ·scale + mask), made some rows at a time. Rows that may attend to nothing are nan."""

    query: Tensor  # (…, n, d)
    key: Tensor  # (…, m, d)
    scale: float
    mask: Tensor | None = None  # (…, n, m), broadcast: true where a query may look, or what is added to the scores
    causal: bool = False  # query i sees the keys 0 to i, as in `scaled_dot_product_attention`

    @property
    def shape(self) -> torch.Size:
        return torch.Size([*self.query.shape[:-1], self.key.shape[-2]])

    def dense(self) -> Tensor:
        return torch.softmax(self._scores(0, *self.shape[-2:]), dim=-1)

    def peaks(self) -> Tensor:
        """The largest number that the softmax of each row reads, (…, n), without the softmax."""
        n, m = self.shape[-2:]
        parts = [self._scores(first, min(first + 1024, n), m).amax(dim=-1) for first in range(0, n, 1024)]
        return torch.cat(parts, dim=-1)

    def tile(self, first: int, last: int) -> Tile:
        m = self.shape[-1]
        step = max(m // _WIDTHS, 1)
        # What no row of the tile may look at is not computed. In a few widths: memory is then used again.
        seen = min(-(-last // step) * step, m) if self.causal else m
        scores = self._scores(first, last, seen)
        return Tile(first, last, seen, torch.softmax(scores, dim=-1), scores)

    def _scores(self, first: int, last: int, seen: int) -> Tensor:
        """What the softmax of these rows reads; −inf where a query may not look."""
        scores = self.query[..., first:last, :] * self.scale @ self.key[..., :seen, :].mT
        if self.causal and first < seen:  # keys before the first query are seen by all
            keys, queries = (torch.arange(first, end, device=scores.device) for end in (seen, last))
            scores[..., first:].masked_fill_(keys > queries[:, None], -torch.inf)
        if self.mask is None:
            return scores
        mask = self.mask.expand(self.shape)[..., first:last, :seen]
        return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
