"""How many directions the tokens use, and how far they are from rank one. Conventions as in `similarity.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from depthscope.measures.norms import with_arithmetic
from depthscope.measures.tokens import TokenMatrix


def singular_values(tokens: Tensor | TokenMatrix, mask: Tensor | None = None, *, exact: bool = False) -> Tensor:
    """Singular values relative to ‖X‖_F, descending, float64, (…, min(n, d)); nan for a zero matrix.

    By default from the smaller Gram matrix in float64, several times faster than the SVD. Squaring
    loses half of the digits: values below √(kε) σ₁ ≈ 4e-7 σ₁ (k = min(n, d) = 768) are noise and are
    set to 0, so a matrix of equal tokens has exactly one non-zero value. `exact=True` takes the SVD.
    """
    x = TokenMatrix.of(tokens, mask)
    _, usable = x.once(_scaled)
    if exact:
        values = torch.linalg.svdvals(x.once(_scaled)[0])
    else:
        squares = x.once(_gram_eigenvalues)
        noise = squares.shape[-1] * torch.finfo(torch.float64).eps * squares[..., :1]
        values = torch.where(squares > noise, squares, 0.0).sqrt()
    return torch.where(usable.unsqueeze(-1), values, torch.nan)


def effective_rank(tokens: Tensor | TokenMatrix, mask: Tensor | None = None, *, exact: bool = False) -> Tensor:
    """exp(−Σ p_i log p_i), p = σ/Σσ (Roy & Vetterli 2007): 1 for rank one, min(n, d) for equal σ.

    From the Gram matrix (see `singular_values`): singular values below √(kε) σ₁ are lost, which
    changes the result by less than k·√(kε)·ln(1/√(kε)), 5e-3 in the worst case at k = 768 and in
    practice below 1e-5. In a deep collapse, where all but one value are that small, the default
    rounds to 1 and `exact=True` follows it further.
    """
    sigma = singular_values(tokens, mask, exact=exact)
    p = sigma / sigma.sum(dim=-1, keepdim=True)
    return torch.special.entr(p).sum(dim=-1).exp()


def ordinary_rank(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """The effective rank of the tokens that are no outliers; without outliers the effective rank itself.

    One huge token brings the effective rank of all tokens near 1, whatever the others do.
    """
    return effective_rank(TokenMatrix.of(tokens, mask).ordinary)


def stable_rank(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """‖X‖_F² / σ₁² ∈ [1, min(n, d)]. The Gram matrix is exact enough here: only σ₁ enters."""
    return singular_values(tokens, mask)[..., 0].square().reciprocal().clamp(min=1)


def composite_residual(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """‖X − 1x̄ᵀ‖_{1,∞} / ‖X‖_{1,∞} (Dong et al. 2021, §2; `composite_norm`).

    The paper's x minimises the residual; the mean is what the authors' code takes, at most a factor 2(1 − 1/n) above
    the least in ‖·‖₁, ‖·‖_∞ and ‖·‖_{1,∞}.
    Taken of the rescaled tokens, whose sums cannot overflow: right for any finite entries.
    """
    x = TokenMatrix.of(tokens, mask).rescaled
    return torch.where(x.count > 0, composite_norm(x.deviations) / composite_norm(x.values), torch.nan)


def composite_norm(x: Tensor) -> Tensor:
    """‖X‖_{1,∞} = √(‖X‖₁ ‖X‖_∞), of a matrix as it is: (…, n, d) → (…) (Dong et al. 2021, §2).

    ‖·‖₁ is the largest absolute column sum, ‖·‖_∞ the largest absolute row sum. The roots are taken first, so that
    entries of 1e-280 give a number of that size and not 0.
    """
    absolute = with_arithmetic(x).abs()
    columns, rows = absolute.sum(dim=-2).amax(dim=-1), absolute.sum(dim=-1).amax(dim=-1)
    return columns.sqrt() * rows.sqrt()


def _scaled(x: TokenMatrix) -> tuple[Tensor, Tensor]:
    """X/‖X‖_F in float64, and where that has a meaning; elsewhere the matrix is 0, which LAPACK takes."""
    values = x.rescaled.values
    norm = torch.linalg.vector_norm(values, dim=(-2, -1))  # of the order of 1: its squares are safe
    usable = norm.isfinite() & (norm > 0)
    scale = torch.where(usable, norm, 1.0)
    return torch.where(usable[..., None, None], values / scale[..., None, None], 0.0), usable


def _gram_eigenvalues(x: TokenMatrix) -> Tensor:
    """Of XXᵀ or XᵀX, whichever is smaller, over ‖X‖_F²: (…, k), descending."""
    unit, _ = x.once(_scaled)
    return torch.linalg.eigvalsh(unit @ unit.mT if unit.shape[-2] <= unit.shape[-1] else unit.mT @ unit).flip(-1)
