"""The largest eigenvalue of a matrix that is only multiplied by vectors, with a bound on what was not seen.

A block Krylov space grows from b random directions V₁; in its basis V the matrix A is the small H, with
A V = V H + Q R Eₖᵀ, where Q is the next block. Vectors stand as rows, (batch, b, n): products are then much faster.
All of it is float64.

Why a random start gives a bound. Let y be a left eigenvector of A, yᵀA = λyᵀ, |y| = 1, and z = yᵀV. Then
z(λ − H) = (yᵀQ) R Eₖᵀ, so its part in the start block is at most φ(λ) = ‖R Eₖᵀ(λ − H)⁻¹E₁‖. But yᵀV₁ is the projection
of a fixed vector onto a random space: it is below z₀ only with a probability that we choose (`least_seen`). So there is
no eigenvalue where φ(λ) < z₀. (For one vector and symmetric A: Hochstenbach 2013.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

CHANCE = 1e-9  # that a bound does not hold, because the start is nearly orthogonal to what it should see
_GAPS = 10.0 ** torch.arange(-7, 0.25, 0.5, dtype=torch.float64)  # relative to the eigenvalue
_NEAR = 0.95  # eigenvalues of this share of the largest could be the largest: they must have converged too
_CAUTION = 2.0  # the conditions of eigenvalues are known from inside the space only


class BlockKrylov:
    """The space of V₁, AV₁, …, A^k V₁. `product` takes and gives rows, (batch, b, n): x ↦ (Ax) for each row x."""

    def __init__(self, product: Callable[[Tensor], Tensor], start: Tensor):
        self._product = product
        self.basis = self._last = start  # orthonormal rows: (batch, K + b, n), and the last b of them
        self._columns: list[Tensor] = []  # of H, each (batch, b, rows so far)
        self.block = start.shape[-2]

    def extend(self, steps: int) -> BlockKrylov:
        """So many products more."""
        for _ in range(steps):
            images = self._product(self._last)
            inside = images @ self.basis.mT  # (batch, b, K)
            images = images - inside @ self.basis
            again = images @ self.basis.mT  # twice is enough
            new, out = _orthonormal(images - again @ self.basis)
            inside = inside + again
            if bool(out.diagonal(dim1=-2, dim2=-1).abs().amin() < 1e-3 * inside.abs().amax()):
                # The images lay in the space to rounding: what is left of them has no direction.
                again = new @ self.basis.mT
                new, second = _orthonormal(new - again @ self.basis)
                inside, out = inside + out.mT @ again, second @ out
            self._columns.append(torch.cat([inside, out.mT], dim=-1))
            self.basis, self._last = torch.cat([self.basis, new], dim=-2), new
        return self

    @property
    def projected(self) -> tuple[Tensor, Tensor]:
        """H (batch, K, K) and R (batch, b, b)."""
        size = self.basis.shape[-2]
        columns = [torch.nn.functional.pad(c, (0, size - c.shape[-1])) for c in self._columns]
        whole = torch.cat(columns, dim=-2).mT  # (batch, K + b, K)
        return whole[..., : -self.block, :], whole[..., -self.block :, -self.block :]


def _orthonormal(rows: Tensor) -> tuple[Tensor, Tensor]:
    q, r = torch.linalg.qr(rows.mT)
    return q.mT.contiguous(), r


def random_rows(batch: int, block: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Orthonormal random rows (batch, b, n), float64, the same at every call."""
    drawn = torch.randn(n, block, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return torch.linalg.qr(drawn).Q.mT.to(device).expand(batch, block, n).contiguous()


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


def largest_of_symmetric(space: BlockKrylov) -> tuple[Tensor, Tensor]:
    """The largest eigenvalue θ that the space of a symmetric A ≥ 0 knows, and a bound on how far A's is above it.

    A has an eigenvalue of at least θ; above θ + bound there is none, but for the chance `CHANCE`. inf: no bound.
    Both (batch,).
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
    return top, torch.where(top > 0, bound, 0.0)


def spectral_radius(space: BlockKrylov, rounding: float = 0.0) -> tuple[Tensor, Tensor]:
    """The largest modulus |θ| in the space, and a bound on its error, to first order; inf where it has not converged.

    A Ritz value θ with residual ρ is an eigenvalue of a matrix within ρ of A, so to first order it is κρ from one of
    A, κ = 1/|y*x| its condition. κ is only known from inside the space: hence `_CAUTION`. Where that is not first order
    (κ²ρ of the size of θ, as near a defective eigenvalue) there is no bound. `rounding` is the error of a product.
    All Ritz values near the largest must have converged; that none was missed rests on the random start. Both (batch,).
    """
    h, r = space.projected
    theta, x = torch.linalg.eig(h)  # columns of length 1
    condition = torch.linalg.vector_norm(torch.linalg.inv_ex(x).inverse, dim=-1)  # (batch, K)
    residual = torch.linalg.vector_norm(r.to(x.dtype) @ x[..., -space.block :, :], dim=-2) + rounding
    size = theta.abs()
    top, best = size.max(dim=-1, keepdim=True)
    error = _CAUTION * condition * residual
    error = torch.where((condition * error < size) & error.isfinite(), error, torch.inf)
    reach = torch.where(size >= _NEAR * top, size - top + error, 0.0).amax(dim=-1)
    return top.squeeze(-1), torch.maximum(reach, error.gather(-1, best).squeeze(-1))
