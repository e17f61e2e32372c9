"""δ and |λ₂| of attention whose matrix is never there, from products with vectors: a sweep over its rows for each.

A sweep makes P once, some rows at a time (`survey.sweep`); memory is O(n) for a given number of vectors. Float32 rows
are multiplied in float32, and sums over the tiles are float64. The first sweep is the survey, which may be at hand.

| measure                        | sweeps                                            |
| ------------------------------ | ------------------------------------------------- |
| δ                              | the survey, and at most 9 with 16 vectors at once |
| abs. λ₂                        | the survey; at most 9 more where P is not causal  |
| ω, μ together                  | 1                                                 |
| entropy, sinks, largest logit  | the survey                                        |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from depthscope.measures.bounded import Bounded
from depthscope.measures.krylov import BlockKrylov, largest_of_symmetric, random_rows, spectral_radius
from depthscope.measures.operators import AttentionOperator, Tile
from depthscope.measures.survey import Survey, survey, sweep

SWEEPS = 10  # that a measure may take
ENOUGH = 1e-5  # relative: no more sweeps than it takes to know it to this
_VECTORS = 16  # at once: beside the scores, they cost next to nothing
_SPECTRUM = 3  # sweeps before the bound is first looked at


def product(attention: AttentionOperator, x: Tensor, real: Tensor | None = None) -> Tensor:
    """P x in the precision of x: (…, n, k) → (…, n, k).

    Written where it stays: small tensors that are kept between tiles would break up the memory that tiles use again.
    """
    *batch, n, _ = torch.broadcast_shapes(attention.shape[:-2], x.shape[:-2]) + attention.shape[-2:]
    found = x.new_empty((*batch, n, x.shape[-1]))
    for tile in sweep(attention, real):
        found[..., tile.first : tile.last, :] = tile.rows.to(x.dtype) @ x[..., : tile.seen, :]
    return found


def largest_on_diagonal(diagonal: Tensor, real: Tensor) -> Tensor:
    """|λ₂| of a lower triangular P with this diagonal (…, n): the first real token attends to itself alone, λ₁ = 1."""
    first = real & (real.cumsum(dim=-1) == 1)
    return diagonal.double().abs().masked_fill(first, 0.0).amax(dim=-1)


def delta(attention: AttentionOperator, real: Tensor | None = None, known: Survey | None = None) -> Bounded:
    """δ with the bound of `krylov.largest_of_symmetric` and of the rounding. `known`: the survey, if there is one."""
    known = _known(attention, real, known)
    spread, centred, few = known.spread, _Centred(attention, known), _of_few(attention, known)
    value, error = torch.zeros_like(spread), torch.zeros_like(spread)
    if bool(centred.used.any()):
        space = BlockKrylov(centred.gram, _start(attention, known))
        for steps in (_SPECTRUM, *[1] * (SWEEPS - 1 - _SPECTRUM - bool(few))):
            square, above, _ = largest_of_symmetric(space.extend(steps))
            value = square.sqrt()
            error = (square + above).sqrt() - value
            if bool((~(error > ENOUGH * value) | ~centred.used).all()):
                break
    for sequence, p in few.items():
        value[sequence], error[sequence] = torch.linalg.matrix_norm(p, 2), 0.0
    return _finished(value, error + centred.rounding, spread, spread.isfinite())


def second_eigenvalue(attention: AttentionOperator, real: Tensor | None = None, known: Survey | None = None) -> Bounded:
    """|λ₂|: on the diagonal of a causal P; else from a Krylov space, whose bound says what it has reached."""
    known = _known(attention, real, known)
    usable = known.spread.isfinite() & (known.count > 1)
    value = torch.where(usable, largest_on_diagonal(known.diagonal, known.real), torch.nan)
    if bool((known.triangular | ~usable | (known.spread == 0)).all()):
        value = torch.where(known.triangular, value, torch.where(usable, 0.0, torch.nan))
        return Bounded(value, torch.zeros_like(value))
    centred, few = _Centred(attention, known), _of_few(attention, known)
    radius, error = torch.zeros_like(known.spread), torch.zeros_like(known.spread)
    if bool(centred.used.any()):
        space = BlockKrylov(centred.times, _start(attention, known))
        for steps in (6, *[1] * (SWEEPS - 7 - bool(few))):
            radius, error = spectral_radius(space.extend(steps), centred.rounding)[:2]
            if bool((~(error > ENOUGH * radius) | ~centred.used).all()):
                break
    for sequence, p in few.items():
        radius[sequence], error[sequence] = torch.linalg.eigvals(p).abs().amax(), centred.rounding
    found = _finished(radius, error, known.spread, usable)
    least = torch.maximum(found.value, 1 - found.value)  # |λ₂| ≤ 1 as well
    found = Bounded(found.value, torch.minimum(found.error, least))
    return Bounded(torch.where(known.triangular, value, found.value), torch.where(known.triangular, 0.0, found.error))


def _known(attention: AttentionOperator, real: Tensor | None, known: Survey | None) -> Survey:
    n, m = attention.shape[-2:]
    if n != m:
        raise ValueError(f"expected attention matrices (…, n, n), got shape {tuple(attention.shape)}")
    return survey(attention, real) if known is None else known


def _block(attention: AttentionOperator) -> int:
    """How many vectors are multiplied at once."""
    return min(_VECTORS, max(attention.shape[-1] // (SWEEPS + 1), 1))


def _start(attention: AttentionOperator, known: Survey) -> Tensor:
    return random_rows(attention.shape[0], _block(attention), known.real, torch.float64)


def _are_few(attention: AttentionOperator, known: Survey) -> Tensor:
    """Which sequences have so few real tokens that a space would be all of theirs, and go on with noise; (batch,)."""
    return known.count <= _block(attention) * (SWEEPS + 1)


def _of_few(attention: AttentionOperator, known: Survey) -> dict[int, Tensor]:
    """Π⊥P/‖Π⊥P‖_F of sequences of few real tokens, without their padding: by number. One sweep, if there are such."""
    few = _are_few(attention, known) & known.spread.isfinite() & (known.spread > 0)
    rows: dict[int, list[Tensor]] = {sequence: [] for sequence in few.nonzero().flatten().tolist()}
    if not rows:
        return {}
    for tile in sweep(attention, known.real):
        for sequence, found in rows.items():
            real = known.real[sequence]
            own = tile.rows[sequence][real[tile.first : tile.last]]
            found.append(torch.nn.functional.pad(own, (0, len(real) - tile.seen))[:, real].double())
    whole = {sequence: torch.cat(found) for sequence, found in rows.items()}
    return {sequence: (p - p.mean(dim=0)) / known.spread[sequence] for sequence, p in whole.items()}


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
        self.used = usable = known.spread.isfinite() & (known.spread > 0) & ~_are_few(attention, known)
        mean, dtype = torch.where(usable.unsqueeze(-1), known.mean_row, 0.0), known.dtype
        self.shift = mean.to(dtype)  # (batch, n)
        self.rest = mean - self.shift.double()
        self.scale = torch.where(usable, known.spread, 1.0)[:, None, None]
        # Relative to ‖Π⊥P‖_F. Sums of n rounded numbers: 17ε were seen at n = 600, under a sink.
        self.rounding = max(attention.shape[-1], 4) ** 0.5 * torch.finfo(dtype).eps
        self.all_used = bool(usable.all())

    def _rows(self) -> Iterator[Tile]:
        for tile in sweep(self.attention, self.real):
            rows = tile.rows - self.shift[..., None, : tile.seen]
            if not self.all_used:
                rows = torch.where(self.used[:, None, None], rows, 0.0)
            yield tile._replace(rows=rows)

    def _image(self, v: Tensor, short: Tensor, tile: Tile) -> Tensor:
        """What the rows of a tile give; behind the keys that they see, they are minus their mean.

        `short` is v in the precision of the rows.
        """
        seen = (short[..., : tile.seen] @ tile.rows.mT).double()
        return seen - v[..., tile.seen :] @ self.shift[..., tile.seen :, None].double() - v @ self.rest.unsqueeze(-1)

    def times(self, v: Tensor) -> Tensor:
        """(Π⊥P) v for every row v."""
        image, short = torch.empty_like(v), v.to(self.known.dtype)
        for t in self._rows():
            image[..., t.first : t.last] = self._image(v, short, t)
        return self._on_real(image) / self.scale

    def gram(self, v: Tensor) -> Tensor:
        """(Π⊥P)ᵀ(Π⊥P) v for every row v: a tile is used for both products."""
        image, total = torch.zeros_like(v), torch.zeros_like(v[..., :1])
        short = v.to(self.known.dtype)
        for t in self._rows():
            y = self._image(v, short, t) / self.scale  # before the second product: squares could underflow
            if self.real is not None:
                y = torch.where(self.real[:, None, t.first : t.last], y, 0.0)
            of_tile = y.sum(dim=-1, keepdim=True)
            total += of_tile
            image[..., : t.seen] += (y.to(t.rows.dtype) @ t.rows).double()
            image[..., t.seen :] -= of_tile * self.shift[..., None, t.seen :].double()
        return self._on_real(image - total * self.rest.unsqueeze(-2)) / self.scale

    def _on_real(self, vectors: Tensor) -> Tensor:
        return vectors if self.real is None else torch.where(self.real.unsqueeze(-2), vectors, 0.0)
