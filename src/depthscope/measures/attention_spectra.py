"""δ and |λ₂| of attention by products with vectors, each with a bound on its own error.

| matrices                       | how                                                                             |
| ------------------------------ | ------------------------------------------------------------------------------- |
| small (n < 80)                 | dense, as `delta` and `second_eigenvalue`                                       |
| of heads that fit into memory  | a Krylov space of Π⊥P; dense for those that have not converged (n ≤ 1024)       |
| longer (`streaming`)           | the same with rows made again for every product, in at most 10 sweeps           |

|λ₂| of a lower triangular (causal) P is on its diagonal. Shapes and masks as in `attention.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from depthscope.measures import streaming
from depthscope.measures.attention import delta, is_triangular, second_eigenvalue, square_rows
from depthscope.measures.bounded import Bounded
from depthscope.measures.heads import GroupedAttention, is_streamed
from depthscope.measures.krylov import BlockKrylov, largest_of_symmetric, random_rows, spectral_radius
from depthscope.measures.operators import AttentionOperator
from depthscope.measures.tokens import TokenMatrix
from depthscope.measures.unit_matrices import UnitMatrices, frobenius_norms

TOLERANCE = 1e-5  # relative: what is not known to it is done by the dense form
_SMALL = 80  # below, the dense form is faster, and a space would be all of Rⁿ
_DENSE_MOST = 1024  # above, the dense form takes too long to stand behind: the bound says what was reached


def bounded_delta(attention: Tensor | AttentionOperator, mask: Tensor | None = None) -> Bounded:
    """δ = ‖Π⊥P‖₂ (see `delta`), with a bound on its error that is true but for a chance of 1e-9 (`krylov`)."""
    if isinstance(attention, Tensor):
        return _delta(attention, mask)
    return _of_group(_delta, attention, mask) or streaming.delta(attention, mask)


def bounded_second_eigenvalue(attention: Tensor | AttentionOperator, mask: Tensor | None = None) -> Bounded:
    """|λ₂(P)| (see `second_eigenvalue`), with a bound on its error, first order in the residual (`spectral_radius`)."""
    if isinstance(attention, Tensor):
        return _second_eigenvalue(attention, mask)
    return _of_group(_second_eigenvalue, attention, mask) or streaming.second_eigenvalue(attention, mask)


def _of_group(compute: Callable[..., Bounded], attention: AttentionOperator, mask: Tensor | None) -> Bounded | None:
    if isinstance(attention, GroupedAttention):
        value, error = attention.group.once(compute, mask)
        return Bounded(value[attention.number], error[attention.number])
    return None if is_streamed(attention) else compute(attention.dense(), mask)


def _delta(attention: Tensor, mask: Tensor | None) -> Bounded:
    if attention.shape[-1] < _SMALL:
        return _exact(delta, attention, mask)
    p = square_rows(attention, mask)
    centred, spread = _centred(p)
    usable = spread.isfinite()
    space = BlockKrylov(centred.gram, _start(centred.values, 4))
    rounding = 2 * torch.finfo(p.values.dtype).eps  # of the deviations and their scale
    for steps in (12, 6):
        found = largest_of_symmetric(space.extend(steps))
        if bool((found.above <= TOLERANCE * found.value).all()):
            break
    value, error = found.root(centred.images)
    error = torch.where(spread > 0, error + rounding, 0.0)
    return _or_exact(delta, Bounded(value * spread, error * spread), usable, attention, mask)


def _second_eigenvalue(attention: Tensor, mask: Tensor | None) -> Bounded:
    if attention.shape[-1] < _SMALL:
        return _exact(second_eigenvalue, attention, mask)
    p = square_rows(attention, mask)
    triangular = is_triangular(p.values).reshape(-1)
    wide, spread = _deflated(p)
    usable = spread.isfinite() & (p.count > 1).reshape(-1)
    value = streaming.largest_on_diagonal(p.values.diagonal(dim1=-2, dim2=-1), p.real).reshape(-1)
    value = torch.where(triangular, value, 0.0)
    error = torch.zeros_like(value)
    left = (usable & ~triangular & (spread > 0)).nonzero().squeeze(-1)
    dtype = p.values.dtype
    for width, block, steps in ((dtype, 1, 40), (torch.float64, 2, 32)):
        if len(left) == 0:
            break
        exact = wide if len(left) == len(wide) else wide[left]
        chosen = exact.to(width)
        space = BlockKrylov(partial(_times, chosen), _start(chosen, block))
        found = spectral_radius(space.extend(steps)).measured(partial(_times, exact))
        off = found.error + torch.finfo(dtype).eps * found.value  # as P is rounded
        value[left], error[left] = found.value * spread[left], off * spread[left]
        left = left[~(off <= TOLERANCE * found.value)]
    return _or_exact(second_eigenvalue, Bounded(value, error), usable, attention, mask)


def _centred(p: TokenMatrix) -> tuple[UnitMatrices, Tensor]:
    """Π⊥P/‖Π⊥P‖_F (matrices, n, n), 0 where that has no meaning, and ‖Π⊥P‖_F (matrices,)."""
    deviations = p.deviations.flatten(0, -3)
    spread, safe = frobenius_norms(deviations)
    if safe:
        return UnitMatrices(deviations, spread.reciprocal()), spread
    spread = p.deviation_norm.reshape(-1)
    usable = spread.isfinite()
    scale = torch.where(usable & (spread > 0), spread, 1.0).to(deviations.dtype)[:, None, None]
    return UnitMatrices(torch.where(usable[:, None, None], deviations / scale, 0.0), torch.ones_like(spread)), spread


def _deflated(p: TokenMatrix) -> tuple[Tensor, Tensor]:
    """The same in float64 throughout: eigenvalues may feel every rounding."""
    centred, spread = _centred(p if p.values.dtype == torch.float64 else TokenMatrix(p.values.double(), p.mask))
    return centred.values * centred.factor[:, None, None], spread


def _times(matrices: Tensor, rows: Tensor) -> Tensor:
    return rows @ matrices.mT


def _start(matrices: Tensor, block: int) -> Tensor:
    count, n, _ = matrices.shape
    everywhere = torch.ones(n, dtype=torch.bool, device=matrices.device)
    return random_rows(count, block, everywhere, matrices.dtype)


def _or_exact(
    exact: Callable[..., Tensor], found: Bounded, usable: Tensor, attention: Tensor, mask: Tensor | None
) -> Bounded:
    """What was found, in the shape of the batch; by the exact form where it is not known to the tolerance."""
    value, error = (torch.where(usable, part, torch.nan) for part in found)
    failed = usable & ~(error <= TOLERANCE * value)
    n = attention.shape[-1]
    if n <= _DENSE_MOST and bool(failed.any()):
        masks = None if mask is None else mask.expand(attention.shape[:-1]).reshape(-1, n)[failed]
        value[failed] = exact(attention.reshape(-1, n, n)[failed], masks)
        error[failed] = 0.0
    shape = attention.shape[:-2]
    return Bounded(value.reshape(shape), error.reshape(shape))


def _exact(compute: Callable[..., Tensor], attention: Tensor, mask: Tensor | None) -> Bounded:
    value = compute(attention, mask)
    return Bounded(value, torch.zeros_like(value))
