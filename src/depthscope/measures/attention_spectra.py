"""δ and |λ₂| of attention by products with vectors, each with a bound on its own error.

| matrices                       | how                                                                             |
| ------------------------------ | ------------------------------------------------------------------------------- |
| small (n < 80)                 | dense, as `delta` and `second_eigenvalue`                                       |
| of heads that fit into memory  | a Krylov space of Π⊥P; dense for those that have not converged (n ≤ 1024)       |
| longer                         | the same with rows made again for every product, in at most 10 sweeps           |

|λ₂| of a lower triangular (causal) P is on its diagonal. Shapes and masks as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.attention import delta, is_triangular, largest_on_diagonal, second_eigenvalue, square_rows
from depthscope.measures.krylov import BlockKrylov, largest_of_symmetric, random_rows, spectral_radius
from depthscope.measures.operators import AttentionOperator
from depthscope.measures.sweeps import Survey, survey
from depthscope.measures.tokens import TokenMatrix

TOLERANCE = 1e-5  # relative: no more products than it takes to know it to this; then the dense form, if there is one
SWEEPS = 10  # over the rows of a long head that a measure may take, the survey among them
_VECTORS = 16  # of a long head, at once: beside the scores, they cost next to nothing
_SMALL = 80  # below, the dense form is faster, and a space would be all of Rⁿ
_DENSE_MOST = 1024  # above, the dense form takes too long to stand behind: the bound says what was reached


class Bounded(NamedTuple):
    """What a fast form found, and how far it can be from what the dense form of the same measure finds.

    Both are float64 of the same shape. `error` is absolute; nan where the value is.
    """

    value: Tensor
    error: Tensor


def bounded_delta(
    attention: Tensor | AttentionOperator, mask: Tensor | None = None, known: Survey | None = None
) -> Bounded:
    """δ = ‖Π⊥P‖₂ (see `delta`), with a bound on its error that is true but for a chance of 1e-9 (`krylov`).

    `known`: the survey of a long head, if there is one.
    """

    def solve(centred: _Centred) -> tuple[Tensor, Tensor]:
        space = centred.space(centred.gram, 4)
        for steps in centred.schedule(12, 6):
            square, above = largest_of_symmetric(space.extend(steps))
            value, error = square.sqrt(), (square + above).sqrt() - square.sqrt()
            if centred.is_known(value, error):
                break
        return value, error

    return _bounded(delta, solve, attention, mask, known)


def bounded_second_eigenvalue(
    attention: Tensor | AttentionOperator, mask: Tensor | None = None, known: Survey | None = None
) -> Bounded:
    """|λ₂(P)| (see `second_eigenvalue`), with a bound on its error, first order in the residual (`spectral_radius`)."""

    def solve(centred: _Centred) -> tuple[Tensor, Tensor]:
        centred.spread = torch.where(centred.real.sum(dim=-1) > 1, centred.spread, torch.nan)
        on_diagonal = largest_on_diagonal(centred.diagonal, centred.real) / centred.scale
        centred.used &= ~centred.triangular
        radius = error = torch.zeros_like(on_diagonal)
        if bool(centred.used.any()):
            space = centred.space(centred.times, 2)
            for steps in centred.schedule(20, 12):
                radius, error = spectral_radius(space.extend(steps), centred.rounding)
                if centred.is_known(radius, error):
                    break
        return torch.where(centred.used, radius, on_diagonal), torch.where(centred.used, error, 0.0)

    return _bounded(second_eigenvalue, solve, attention, mask, known)


def _bounded(
    exact: Callable[..., Tensor],
    solve: Callable[[_Centred], tuple[Tensor, Tensor]],
    attention: Tensor | AttentionOperator,
    mask: Tensor | None,
    known: Survey | None,
) -> Bounded:
    """In the size of P and the shape of its batch; by the exact form where there is one and the bound is too wide."""
    n, m = attention.shape[-2:]
    if n != m:
        raise ValueError(f"expected attention matrices (…, n, n), got shape {tuple(attention.shape)}")
    p = attention if isinstance(attention, Tensor) or attention.is_streamed else attention.dense()
    if isinstance(p, Tensor) and n < _SMALL:
        value = exact(p, mask)
        return Bounded(value, torch.zeros_like(value))
    centred = _Dense(square_rows(p, mask)) if isinstance(p, Tensor) else _Streamed(p, mask, known)
    value, error = solve(centred)
    # |λ₂| ≤ δ ≤ ‖Π⊥P‖_F: no error is larger than what is left up to it, or down to 0.
    error = torch.minimum(error + centred.rounding * (value > 0), torch.maximum(value, 1 - value))
    usable = centred.spread.isfinite()
    parts = (torch.where(centred.spread == 0, 0.0, part) * centred.spread for part in (value, error))
    value, error = (torch.where(usable, part, torch.nan) for part in parts)
    failed = usable & ~(error <= TOLERANCE * value)
    if isinstance(p, Tensor) and n <= _DENSE_MOST and bool(failed.any()):
        masks = None if mask is None else mask.expand(p.shape[:-1]).reshape(-1, n)[failed]
        value[failed], error[failed] = exact(p.reshape(-1, n, n)[failed], masks), 0.0
    return Bounded(value.reshape(p.shape[:-2]), error.reshape(p.shape[:-2]))


class _Centred:
    """C = Π⊥P/‖Π⊥P‖_F in float64, (matrices, n, n), applied to rows of vectors (matrices, k, n).

    `times` is C v and `gram` CᵀC v for every row v.
    """

    times: Callable[[Tensor], Tensor]
    gram: Callable[[Tensor], Tensor]

    def __init__(self, spread: Tensor, diagonal: Tensor, triangular: Tensor, real: Tensor):
        self.spread, self.diagonal, self.triangular, self.real = spread, diagonal, triangular, real
        self.used = spread.isfinite() & (spread > 0)
        self.scale = torch.where(self.used, spread, 1.0)
        self.rounding = real.shape[-1] ** 0.5 * torch.finfo(torch.float64).eps  # of sums of n rounded numbers

    def space(self, product: Callable[[Tensor], Tensor], block: int) -> BlockKrylov:
        return BlockKrylov(product, random_rows(len(self.spread), block, self.real.shape[-1], self.real.device))

    def schedule(self, *steps: int) -> tuple[int, ...]:
        """How many products more, before the bound is looked at again."""
        return steps

    def is_known(self, value: Tensor, error: Tensor) -> bool:
        return bool((~(error > TOLERANCE / 2 * value) | ~self.used).all())


class _Dense(_Centred):
    """Of matrices that are there."""

    def __init__(self, p: TokenMatrix):
        wide = TokenMatrix(p.values.double(), p.mask)
        n = p.values.shape[-1]
        super().__init__(
            wide.deviation_norm.reshape(-1),
            p.values.diagonal(dim1=-2, dim2=-1).reshape(-1, n),
            is_triangular(p.values).reshape(-1),
            p.real.reshape(-1, n),
        )
        deviations = wide.deviations.flatten(0, -3) / self.scale[:, None, None]
        self.matrices = torch.where(self.used[:, None, None], deviations, 0.0)

        self.times = lambda v: v @ self.matrices.mT
        self.gram = lambda v: (v @ self.matrices.mT) @ self.matrices


class _Streamed(_Centred):
    """Of rows that are made again for each product, in one sweep. Rows may be nearly equal (under a sink), so they are
    shifted by their mean before they are multiplied, and nothing cancels."""

    def __init__(self, attention: AttentionOperator, mask: Tensor | None, known: Survey | None):
        known = survey(attention, mask) if known is None else known
        super().__init__(known.spread, known.diagonal, known.triangular, known.real)
        self.attention, self.mean = attention, torch.where(self.used.unsqueeze(-1), known.mean_row, 0.0)
        self.times, self.gram = (partial(self._sweep, both=both) for both in (False, True))

    def space(self, product: Callable[[Tensor], Tensor], block: int) -> BlockKrylov:
        """Of more vectors at once; of more dimensions than n there is no space."""
        return super().space(product, min(_VECTORS, max(self.real.shape[-1] // (SWEEPS + 1), 1)))

    def schedule(self, *steps: int) -> tuple[int, ...]:
        return 3, *[1] * (SWEEPS - 4)

    def _sweep(self, v: Tensor, both: bool) -> Tensor:
        """C v, or CᵀC v: a tile is used for both products. After the keys that they see, rows are minus their mean."""
        image = torch.zeros_like(v)
        for tile in self.attention.tiles():
            own, seen = self.real[:, tile.first : tile.last], tile.seen
            kept = own[..., None] & self.real[:, None, :seen] & self.used[:, None, None]
            rows = torch.where(kept, tile.rows.double(), 0.0) - self.mean[:, None, :seen]
            y = v[..., :seen] @ rows.mT - v[..., seen:] @ self.mean[:, seen:, None]
            y = torch.where(own[:, None, :], y, 0.0) / self.scale[:, None, None]
            if both:
                image[..., :seen] += y @ rows
                image[..., seen:] -= y.sum(dim=-1, keepdim=True) * self.mean[:, None, seen:]
            else:
                image[..., tile.first : tile.last] = y
        return image / self.scale[:, None, None] if both else image
