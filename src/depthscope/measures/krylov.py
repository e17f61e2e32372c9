"""The largest eigenvalue of a matrix that is only multiplied by vectors, with a bound on what was not seen.

A block Krylov space grows from b random directions V₁; in its basis V the matrix A is the small H, with
A V = V H + Q R Eₖᵀ, where Q is the next block. Vectors stand as rows, (batch, b, n): products are then much faster.

Why a random start gives a bound. Let y be a left eigenvector of A, yᵀA = λyᵀ, |y| = 1, and z = yᵀV. Then
z(λ − H) = (yᵀQ) R Eₖᵀ, so its part in the start block is at most φ(λ) = ‖R Eₖᵀ(λ − H)⁻¹E₁‖. But yᵀV₁ is the projection
of a fixed vector onto a random space: it is below z₀ only with a probability that we choose (`least_seen`). So there is
no eigenvalue where φ(λ) < z₀. (For one vector and symmetric A: Hochstenbach 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.bounded import Bounded

CHANCE = 1e-9  # that a bound does not hold, because the start is nearly orthogonal to what it should see
_GAPS = 10.0 ** torch.arange(-7, 0.25, 0.5, dtype=torch.float64)  # relative to the eigenvalue
_NEAR = 0.95  # eigenvalues of this share of the largest could be the largest: they must have converged too
_CAUTION = 2.0  # the conditions of eigenvalues are known from inside the space only


class BlockKrylov:
    """The space of V₁, AV₁, …, A^k V₁. `product` takes and gives rows, (batch, b, n): x ↦ (Ax) for each row x."""

    def __init__(self, product: Callable[[Tensor], Tensor], start: Tensor):
        self._product = product
        self._last = start  # (batch, b, n), orthonormal rows
        self._store = start  # whose first rows are the basis
        self._columns: list[Tensor] = []  # of H, each (batch, b, rows so far)
        self.block = start.shape[-2]

    @property
    def basis(self) -> Tensor:
        """(batch, K + b, n), orthonormal rows."""
        return self._store[:, : self.block * (len(self._columns) + 1)]

    def _make_room(self, steps: int) -> None:
        """Once for all steps that are asked for: copying the basis at each of them would cost more than a product."""
        known = self.basis
        rows = self.block * (len(self._columns) + steps + 1)
        self._store = known.new_empty(known.shape[0], rows, known.shape[2])
        self._store[:, : known.shape[1]] = known

    def extend(self, steps: int) -> BlockKrylov:
        """So many products more."""
        self._make_room(steps)
        for _ in range(steps):
            images = self._product(self._last).to(self.basis.dtype)
            inside = images @ self.basis.mT  # (batch, b, K)
            images = torch.baddbmm(images, inside, self.basis, alpha=-1)
            again = images @ self.basis.mT  # twice is enough
            new, out = _orthonormal(torch.baddbmm(images, again, self.basis, alpha=-1))
            inside = inside + again
            if bool(_is_noise(out, inside)):  # the images lay in the space to rounding: what is left has no direction
                again = new @ self.basis.mT
                new, second = _orthonormal(torch.baddbmm(new, again, self.basis, alpha=-1))
                inside, out = inside + out.mT @ again, second @ out
            self._columns.append(torch.cat([inside, out.mT], dim=-1))
            self._store[:, self.basis.shape[1] - self.block : self.basis.shape[1]] = new
            self._last = new
        return self

    @property
    def projected(self) -> tuple[Tensor, Tensor]:
        """H (batch, K, K) and R (batch, b, b), float64."""
        size = self.basis.shape[-2]
        columns = [torch.nn.functional.pad(c.double(), (0, size - c.shape[-1])) for c in self._columns]
        whole = torch.cat(columns, dim=-2).mT  # (batch, K + b, K)
        return whole[..., : -self.block, :], whole[..., -self.block :, -self.block :]


def _is_noise(out: Tensor, inside: Tensor) -> Tensor:
    """Whether so little of an image is outside of the space that its direction there is rounding."""
    return out.diagonal(dim1=-2, dim2=-1).abs().amin() < 1e-3 * inside.abs().amax()


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    if rows.shape[-2] == 1:
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        if bool((length > 0).all()):
            return rows / length, length
    q, r = torch.linalg.qr(rows.mT)
    return q.mT.contiguous(), r


def random_rows(batch: int, block: int, real: Tensor, dtype: torch.dtype) -> Tensor:
    """Orthonormal random rows (batch, b, n), the same at every call; 0 at padding. `real` is (batch, n) or (n)."""
    n = real.shape[-1]
    drawn = torch.randn(n, block, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).to(real.device)
    q, _ = torch.linalg.qr(torch.where(real.unsqueeze(-1), drawn, 0.0))
    return q.mT.to(dtype).expand(batch, block, n).contiguous()


@cache
def least_seen(n: int, block: int, chance: float = CHANCE) -> float:
    """z₀: the projection of a unit vector of Rⁿ onto `block` random directions is shorter only with this chance.

    Its square has the distribution Beta(b/2, (n − b)/2), whose lower tail is below
    t^(b/2) Γ(n/2) / (Γ(b/2 + 1) Γ((n − b)/2)).
    """
    if n <= block:
        return 1.0
    log = math.log(chance) + math.lgamma(block / 2 + 1) + math.lgamma((n - block) / 2) - math.lgamma(n / 2)
    return min(1.0, math.exp(log / block))


class Largest(NamedTuple):
    """The largest eigenvalue that a space of a symmetric A ≥ 0 knows, (batch,)."""

    value: Tensor  # θ
    above: Tensor  # a bound on how far that of A can be above it; inf: no bound
    vector: Tensor  # (batch, n), of length 1

    def root(self, product: Callable[[Tensor], Tensor]) -> Bounded:
        """√ of the largest eigenvalue of A = BᵀB, given x ↦ Bx in float64, (batch, n) → (batch, m).

        ‖Bx‖ is right to the square of the error of x. How far it is from √θ shows what the products of the space were
        rounded by, which the bound has to have in it too.
        """
        length = torch.linalg.vector_norm(self.vector, dim=-1)
        value = torch.linalg.vector_norm(product(self.vector), dim=-1) / length
        theta = self.value.sqrt()
        off = (theta - value).abs()
        return Bounded(value, (self.value + self.above).sqrt() - theta + _CAUTION * off)


def largest_of_symmetric(space: BlockKrylov) -> Largest:
    """The largest eigenvalue θ of the space.

    A has an eigenvalue of at least θ; above θ + bound there is none, but for the chance `CHANCE`. inf: no bound.
    """
    h, r = space.projected
    b, n = space.block, space.basis.shape[-1]
    theta, u = torch.linalg.eigh((h + h.mT) / 2)
    top = theta[..., -1].clamp(min=0)
    first, last = u[..., :b, :], r @ u[..., -b:, :]  # (batch, b, K)
    gaps = _GAPS.to(top.device)[:, None] * top  # (gaps, batch)
    away = (top + gaps)[..., None, None] - theta[:, None, :]  # (gaps, batch, 1, K)
    seen = torch.linalg.matrix_norm((first / away) @ last.mT)  # φ, in the Frobenius norm
    excluded = seen < least_seen(n, b)
    bound = torch.where(excluded.any(dim=0), gaps.gather(0, excluded.int().argmax(dim=0)[None])[0], torch.inf)
    vector = (u[..., -1].unsqueeze(-2) @ space.basis[..., :-b, :].double()).squeeze(-2)
    return Largest(top, torch.where(top > 0, bound, 0.0), vector)


class Radius(NamedTuple):
    """The largest eigenvalue in modulus that a space knows, (batch,)."""

    value: Tensor  # |θ|
    error: Tensor  # a bound, to first order; inf where it has not converged
    eigenvalue: Tensor  # θ, complex
    vector: Tensor  # x, complex, (batch, n), of length 1
    condition: Tensor  # κ

    def measured(self, product: Callable[[Tensor], Tensor]) -> Bounded:
        """With the rounding of the products in it: the residual of x is taken again, by a product in float64."""
        parts = torch.view_as_real(self.vector).mT.contiguous()  # (batch, 2, n)
        image = torch.view_as_complex(product(parts).mT.contiguous())
        residual = torch.linalg.vector_norm(image - self.eigenvalue.unsqueeze(-1) * self.vector, dim=-1)
        return Bounded(self.value, torch.maximum(self.error, _CAUTION * self.condition * residual))


def spectral_radius(space: BlockKrylov, rounding: float = 0.0) -> Radius:
    """The largest modulus |θ| in the space, and a bound on its error.

    A Ritz value θ with residual ρ is an eigenvalue of a matrix within ρ of A, so to first order it is κρ from one of
    A, κ = 1/|y*x| its condition. κ is only known from inside the space: hence `_CAUTION`. Where that is not first order
    (κ²ρ of the size of θ, as near a defective eigenvalue) there is no bound. `rounding` is the error of a product.
    All Ritz values near the largest must have converged; that none was missed rests on the random start.
    """
    h, r = space.projected
    b = space.block
    theta, x = torch.linalg.eig(h)  # columns of length 1
    inverse, _ = torch.linalg.inv_ex(x)
    condition = torch.linalg.vector_norm(inverse, dim=-1)  # (batch, K)
    residual = torch.linalg.vector_norm(r.to(x.dtype) @ x[..., -b:, :], dim=-2) + rounding
    size = theta.abs()
    top, best = size.max(dim=-1, keepdim=True)
    error = _CAUTION * condition * residual
    error = torch.where((condition * error < size) & error.isfinite(), error, torch.inf)
    reach = torch.where(size >= _NEAR * top, size - top + error, 0.0).amax(dim=-1)
    inner = x.gather(-1, best.unsqueeze(-2).expand(*x.shape[:-1], 1)).squeeze(-1)  # (batch, K)
    rows = torch.view_as_real(inner).mT @ space.basis[..., :-b, :].double()  # (batch, 2, n)
    own = error.gather(-1, best).squeeze(-1)
    return Radius(
        top.squeeze(-1),
        torch.maximum(reach, own),
        theta.gather(-1, best).squeeze(-1),
        torch.view_as_complex(rows.mT.contiguous()),
        condition.gather(-1, best).squeeze(-1),
    )
