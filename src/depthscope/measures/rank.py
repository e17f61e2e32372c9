"""How many directions the tokens use, and how far they are from rank one. Conventions as in `similarity.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.norms import with_arithmetic
from depthscope.measures.tokens import TokenMatrix


class LeadingDirection(NamedTuple):
    """The leading singular pair of the tokens, and what its left vector u looks like."""

    energy_share: Tensor  # σ₁² / ‖X‖_F²
    evenness: Tensor  # (Σ u_i)² / n ∈ [0, 1]: 1 if every token takes the same part, as in a collapse
    largest_token: Tensor  # max u_i² ∈ [1/n, 1]: 1 if it is a single token, as with a sink


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
        squares = x.once(_gram_eigenvalues)  # σ²/‖X‖_F², descending
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


class SampledRank(NamedTuple):
    """The mean effective rank of a batch as some of its sequences show it, and its standard error."""

    mean: Tensor
    error: Tensor


def sampled_rank(x: TokenMatrix, share: int = 4) -> SampledRank:
    """The mean effective rank of a batch (batch, n, d), from one sequence in `share` and at least two, evenly spread.

    `error` is its standard error: that of a mean of m of N values, s/√m · √(1 − m/N); nan of a single sequence that is
    not the whole batch. Sequences without an effective rank are left out.
    """
    batch = x.values.shape[0]
    count = min(batch, max(2, batch // share))
    chosen = torch.arange(count, device=x.values.device) * batch // count
    ranks = effective_rank(TokenMatrix(x.values[chosen], None if x.mask is None else x.mask[chosen]))
    known = ranks.isfinite()
    found = known.sum()
    mean = torch.where(known, ranks, 0.0).sum() / found
    spread = (torch.where(known, ranks - mean, 0.0).square().sum() / (found - 1)).sqrt()  # nan of one
    missing = 1 - found / batch
    return SampledRank(mean, torch.where(missing > 0, spread * (missing / found).sqrt(), 0.0))


def ordinary_rank(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """The effective rank of the tokens that are no outliers; without outliers the effective rank itself.

    One huge token brings the effective rank of all tokens near 1, whatever the others do.
    """
    return effective_rank(TokenMatrix.of(tokens, mask).ordinary)


def stable_rank(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """‖X‖_F² / σ₁² ∈ [1, min(n, d)]. The Gram matrix is exact enough here: only σ₁ enters."""
    return singular_values(tokens, mask)[..., 0].square().reciprocal().clamp(min=1)


def leading_direction(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> LeadingDirection:
    """The energy of the leading direction, and whether it is shared by all tokens or belongs to one.

    With X ≈ σ₁ u vᵀ: `evenness` near 1 is a collapse onto one vector, `largest_token` near 1 is a
    sink; both near 0 are, for example, two opposite clusters (t_sim ≈ 0 but rank one).
    The two are nan where σ₁ = σ₂ to rounding: the leading direction is not unique there.
    """
    x = TokenMatrix.of(tokens, mask)
    scaled, usable = x.once(_scaled)
    squares, vectors = x.once(_gram_eigenvectors)
    top = squares[..., -1]
    u = vectors[..., -1]  # (…, k)
    if scaled.shape[-2] > scaled.shape[-1]:  # a right singular vector: u = Xv/σ
        u = (scaled @ u.unsqueeze(-1)).squeeze(-1) / top.sqrt().unsqueeze(-1)
    second = squares[..., -2] if squares.shape[-1] > 1 else torch.zeros_like(top)
    unique = usable & (top - second > squares.shape[-1] * torch.finfo(torch.float64).eps * top)
    return LeadingDirection(
        energy_share=torch.where(usable, top.clamp(max=1), torch.nan),
        evenness=torch.where(unique, (u.sum(dim=-1).square() / x.count).clamp(max=1), torch.nan),
        largest_token=torch.where(unique, u.square().amax(dim=-1).clamp(max=1), torch.nan),
    )


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
    return torch.linalg.eigvalsh(_smaller_gram(x)).flip(-1)


def _gram_eigenvectors(x: TokenMatrix) -> tuple[Tensor, Tensor]:
    return torch.linalg.eigh(_smaller_gram(x))  # ascending


def _smaller_gram(x: TokenMatrix) -> Tensor:
    """XXᵀ or XᵀX over ‖X‖_F², whichever is smaller: (…, k, k), k = min(n, d)."""
    unit, _ = x.once(_scaled)
    return unit @ unit.mT if unit.shape[-2] <= unit.shape[-1] else unit.mT @ unit
