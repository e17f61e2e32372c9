"""Measures of attention whose matrix is never there: sweeps over its rows, some at a time.

A sweep makes P once, tile by tile (`AttentionOperator.tiles`), at the cost of one attention pass; memory is O(n) for a
given number of vectors. Of one head, (batch, n, d) queries and keys; `real` (batch, n) is true for real tokens: rows
and columns of padding are left out. Float32 rows are multiplied in float32, and sums over the tiles are float64.

| measure             | sweeps                                       |
| ------------------- | -------------------------------------------- |
| δ                   | 1 + at most 9, with 16 vectors at once       |
| abs. λ₂             | causal: 1; else 1 + at most 9                |
| ω, μ together       | 1                                            |
| entropy, sinks      | 1 each                                       |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures.bounded import Bounded
from depthscope.measures.krylov import BlockKrylov, largest_of_symmetric, random_rows, spectral_radius
from depthscope.measures.operators import AttentionOperator, Tile

SWEEPS = 10  # that a measure may take
ENOUGH = 1e-5  # relative: no more sweeps than it takes to know it to this
_VECTORS = 16  # at once: beside the scores, they cost next to nothing
_SPECTRUM = 3  # sweeps before the bound is first looked at


def sweep(attention: AttentionOperator, real: Tensor | None) -> Iterator[Tile]:
    """P once, with rows and columns of padding set to 0."""
    for tile in attention.tiles():
        if real is not None:
            kept = real[..., tile.first : tile.last, None] & real[..., None, : tile.seen]
            tile = tile._replace(rows=torch.where(kept, tile.rows, 0.0))
        yield tile


def product(attention: AttentionOperator, x: Tensor, real: Tensor | None = None) -> Tensor:
    """P x in the precision of x: (…, n, k) → (…, n, k)."""
    parts = [tile.rows.to(x.dtype) @ x[..., : tile.seen, :] for tile in sweep(attention, real)]
    return torch.cat(parts, dim=-2)


def entropy(attention: AttentionOperator, real: Tensor | None = None) -> Tensor:
    """The mean over the real rows of −Σ_j p_ij log p_ij; takes cross-attention too."""
    batch, n = attention.shape[:-2], attention.shape[-2]
    total, count = torch.zeros(()), torch.full(batch, float(n), dtype=torch.float64)
    if real is not None:
        count = real.sum(dim=-1).double()
    for tile in attention.tiles():
        of_rows = torch.special.entr(tile.rows).sum(dim=-1, dtype=torch.float64)  # (…, rows)
        if real is not None:
            of_rows = torch.where(real[..., tile.first : tile.last], of_rows, 0.0)
        total = total + of_rows.sum(dim=-1)
    mean = total / count.to(total.device)
    return torch.where(mean.isfinite(), mean, torch.nan)


def column_share(attention: AttentionOperator, columns: Tensor, real: Tensor | None = None) -> Tensor:
    """The attention that some tokens draw, `columns` (…, n), mean over the real rows."""
    drawn = product(attention, columns.unsqueeze(-1).double(), None).squeeze(-1)  # (…, n)
    if real is None:
        return drawn.mean(dim=-1)
    return torch.where(real, drawn, 0.0).sum(dim=-1) / real.sum(dim=-1)


def largest_on_diagonal(diagonal: Tensor, real: Tensor) -> Tensor:
    """|λ₂| of a lower triangular P with this diagonal (…, n): the first real token attends to itself alone, λ₁ = 1."""
    first = real & (real.cumsum(dim=-1) == 1)
    return diagonal.double().abs().masked_fill(first, 0.0).amax(dim=-1)


@dataclass(frozen=True)
class Survey:
    """What one sweep finds out."""

    mean_row: Tensor  # p̄ (batch, n), float64
    spread: Tensor  # ‖Π⊥P‖_F (batch,), float64; nan where an entry is not finite, or no token real
    diagonal: Tensor  # (batch, n), float64
    triangular: Tensor  # (batch,), bool
    count: Tensor  # (batch,), float64
    real: Tensor  # (batch, n)
    narrow: bool  # whether tiles end at their last row: a causal operator
    dtype: torch.dtype  # of the rows


def survey(attention: AttentionOperator, real: Tensor | None = None) -> Survey:
    """One sweep. Rows are shifted by the first real one before they are summed: equal rows have no spread at all."""
    n, m = attention.shape[-2:]
    if n != m:
        raise ValueError(f"expected attention matrices (…, n, n), got shape {tuple(attention.shape)}")
    narrow = bool(getattr(attention, "causal", False))
    found: _Sums | None = None
    for tile in sweep(attention, real):
        if found is None:
            found = _Sums(attention.shape, tile.rows, real, narrow)
        found.add(tile)
    assert found is not None
    return found.finished()


class _Sums:
    """What a survey adds up, tile by tile."""

    def __init__(self, shape: torch.Size, like: Tensor, real: Tensor | None, narrow: bool):
        *batch, n, m = shape
        device = like.device
        self.masked, self.narrow = real is not None, narrow
        self.real = torch.ones((*batch, n), dtype=torch.bool, device=device) if real is None else real.to(device)
        self.shift = torch.zeros((*batch, m), dtype=like.dtype, device=device)  # the first real row
        self.unknown = torch.ones(batch, dtype=torch.bool, device=device)  # where that has not come yet
        self.sums = torch.zeros((*batch, m), dtype=torch.float64, device=device)
        self.squares = torch.zeros(batch, dtype=torch.float64, device=device)
        self.triangular = torch.ones(batch, dtype=torch.bool, device=device)
        self.diagonal = torch.zeros((*batch, n), dtype=torch.float64, device=device)

    def add(self, tile: Tile) -> None:
        rows, here = tile.rows, self.real[..., tile.first : tile.last]
        self.diagonal[..., tile.first : tile.last] = rows.diagonal(offset=tile.first, dim1=-2, dim2=-1)
        if not self.narrow and bool(self.triangular.any()):
            self.triangular = self.triangular & ~rows.triu(tile.first + 1).flatten(-2).any(dim=-1)
        # Causal rows are shifted too: under a sink, all of them are nearly the first one, which looks at itself.
        self._find_first(rows, here)
        rows = rows - self.shift[..., None, : tile.seen]
        if self.masked:
            rows = torch.where(here.unsqueeze(-1), rows, 0.0)
        self.sums[..., : tile.seen] += rows.sum(dim=-2, dtype=torch.float64)
        # In float64: the first row may be far from all others, and n·‖offset‖² then takes away nearly all of it.
        norms = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
        self.squares += norms.square().sum(dim=-1)

    def _find_first(self, rows: Tensor, here: Tensor) -> None:
        if bool(self.unknown.any()):
            found = self.unknown & here.any(dim=-1)
            index = here.int().argmax(dim=-1)[..., None, None].expand(*here.shape[:-1], 1, rows.shape[-1])
            row = rows.gather(-2, index).squeeze(-2)
            row = torch.nn.functional.pad(row, (0, self.shift.shape[-1] - row.shape[-1]))  # it sees no more
            self.shift = torch.where(found.unsqueeze(-1), row, self.shift)
            self.unknown = self.unknown & ~found

    def finished(self) -> Survey:
        count = self.real.sum(dim=-1).double()
        offset = self.sums / count.unsqueeze(-1)
        spread = (self.squares - count * offset.square().sum(dim=-1)).clamp(min=0).sqrt()
        spread = torch.where(self.squares == 0, 0.0, spread)
        spread = torch.where((count > 0) & spread.isfinite(), spread, torch.nan)
        return Survey(
            self.shift.double() + offset,
            spread,
            self.diagonal,
            self.triangular,
            count,
            self.real,
            self.narrow,
            self.shift.dtype,
        )


def delta(attention: AttentionOperator, real: Tensor | None = None) -> Bounded:
    """δ with the bound of `krylov.largest_of_symmetric` and of the rounding."""
    known = survey(attention, real)
    spread, centred = known.spread, _Centred(attention, known)
    space = BlockKrylov(centred.gram, _start(attention, known))
    for steps in (_SPECTRUM, *[1] * (SWEEPS - 1 - _SPECTRUM)):
        square, above, _ = largest_of_symmetric(space.extend(steps))
        value = square.sqrt()
        error = (square + above).sqrt() - value
        if bool((~(error > ENOUGH * value)).all()):
            break
    return _finished(value, error + centred.rounding, spread, spread.isfinite())


def second_eigenvalue(attention: AttentionOperator, real: Tensor | None = None) -> Bounded:
    """|λ₂|: on the diagonal of a causal P; else from a Krylov space, whose bound says what it has reached."""
    known = survey(attention, real)
    usable = known.spread.isfinite() & (known.count > 1)
    value = torch.where(usable, largest_on_diagonal(known.diagonal, known.real), torch.nan)
    if bool((known.triangular | ~usable | (known.spread == 0)).all()):
        value = torch.where(known.triangular, value, torch.where(usable, 0.0, torch.nan))
        return Bounded(value, torch.zeros_like(value))
    centred = _Centred(attention, known)
    space = BlockKrylov(centred.times, _start(attention, known))
    for steps in (6, *[1] * (SWEEPS - 7)):
        radius, error = spectral_radius(space.extend(steps), centred.rounding)[:2]
        if bool((~(error > ENOUGH * radius)).all()):
            break
    found = _finished(radius, error, known.spread, usable)
    least = torch.maximum(found.value, 1 - found.value)  # |λ₂| ≤ 1 as well
    found = Bounded(found.value, torch.minimum(found.error, least))
    return Bounded(torch.where(known.triangular, value, found.value), torch.where(known.triangular, 0.0, found.error))


def _start(attention: AttentionOperator, known: Survey) -> Tensor:
    block = min(_VECTORS, max(attention.shape[-1] // (SWEEPS + 1), 1))
    return random_rows(attention.shape[0], block, known.real, torch.float64)


def _finished(value: Tensor, error: Tensor, spread: Tensor, usable: Tensor) -> Bounded:
    """In the size of P. |λ₂| ≤ δ ≤ ‖Π⊥P‖_F, so no error is larger than what is left up to it, or down to 0."""
    value = torch.where(spread == 0, 0.0, value)
    error = torch.where(spread == 0, 0.0, torch.minimum(error, torch.maximum(value, 1 - value)))
    return Bounded(*(torch.where(usable, part * spread, torch.nan) for part in (value, error)))


class _Centred:
    """Π⊥P/‖Π⊥P‖_F applied to rows of vectors (batch, k, n), in one sweep each.

    Rows may be nearly equal (also causal ones: under a sink), so they are shifted by their mean before they are
    multiplied, and nothing cancels; the rest of the mean, which float32 cannot hold, is taken from the result.
    """

    def __init__(self, attention: AttentionOperator, known: Survey):
        self.attention, self.known = attention, known
        self.real = None if bool(known.real.all()) else known.real
        self.finite = known.spread.isfinite()
        usable = self.finite & (known.spread > 0)
        mean, dtype = torch.where(usable.unsqueeze(-1), known.mean_row, 0.0), known.dtype
        self.shift = mean.to(dtype)  # (batch, n)
        self.rest = mean - self.shift.double()
        self.scale = torch.where(usable, known.spread, 1.0)[:, None, None]
        # Relative to ‖Π⊥P‖_F. Sums of n rounded numbers: 17ε were seen at n = 600, under a sink.
        self.rounding = max(attention.shape[-1], 4) ** 0.5 * torch.finfo(dtype).eps
        self.all_finite = bool(self.finite.all())

    def _rows(self) -> Iterator[Tile]:
        for tile in sweep(self.attention, self.real):
            rows = tile.rows - self.shift[..., None, : tile.seen]
            if not self.all_finite:
                rows = torch.where(self.finite[:, None, None], rows, 0.0)
            yield tile._replace(rows=rows)

    def _image(self, v: Tensor, tile: Tile) -> Tensor:
        """What the rows of a tile give; behind the keys that they see, they are minus their mean."""
        seen = (v[..., : tile.seen].to(tile.rows.dtype) @ tile.rows.mT).double()
        return seen - v[..., tile.seen :] @ self.shift[..., tile.seen :, None].double() - v @ self.rest.unsqueeze(-1)

    def times(self, v: Tensor) -> Tensor:
        """(Π⊥P) v for every row v."""
        return self._on_real(torch.cat([self._image(v, tile) for tile in self._rows()], dim=-1)) / self.scale

    def gram(self, v: Tensor) -> Tensor:
        """(Π⊥P)ᵀ(Π⊥P) v for every row v: a tile is used for both products."""
        image, total = torch.zeros_like(v), torch.zeros_like(v[..., :1])
        for t in self._rows():
            y = self._image(v, t)
            if self.real is not None:
                y = torch.where(self.real[:, None, t.first : t.last], y, 0.0)
            of_tile = y.sum(dim=-1, keepdim=True)
            total += of_tile
            image[..., : t.seen] += (y.to(t.rows.dtype) @ t.rows).double()
            image[..., t.seen :] -= of_tile * self.shift[..., None, t.seen :].double()
        return self._on_real(image - total * self.rest.unsqueeze(-2)) / self.scale.square()

    def _on_real(self, vectors: Tensor) -> Tensor:
        return vectors if self.real is None else torch.where(self.real.unsqueeze(-2), vectors, 0.0)
