"""What a pair of weight matrices does to tokens: H = W_V W_O, which moves them, or W_Q W_Kᵀ, which compares them.

A product H = LR of L (…, d, k) and R (…, k, d) for row vectors is never formed where k < d: its eigenvalues other than
d − k zeros are those of RL (…, k, k), which for one head is d_h × d_h. Everything is computed in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

F64 = torch.float64


def product_eigenvalues(left: Tensor, right: Tensor) -> Tensor:
    """The eigenvalues of LR, complex128 (…, min(d, k)); the d − k zeros that a thin product has besides are left out.

    Those below the rounding of the product, k·ε·‖L‖‖R‖, are 0. Refused where a weight is nan or infinite, or no real
    number as it stands: complex ones, and integers that somebody's code scales.
    """
    if left.shape[-2:] != right.mT.shape[-2:]:
        raise ValueError(f"expected shapes (…, d, k) and (…, k, d), got {tuple(left.shape)} and {tuple(right.shape)}")
    for weight in (left, right):
        if not weight.is_floating_point():
            raise ValueError(f"expected real weights, got {str(weight.dtype).removeprefix('torch.')}")
    left, right = left.to(F64), right.to(F64)
    if not (left.isfinite().all() & right.isfinite().all()):
        raise ValueError("expected finite weights, got nan or inf in them")
    (left, left_size), (right, right_size) = _near_one(left), _near_one(right)
    found = torch.linalg.eigvals(right @ left if left.shape[-1] <= left.shape[-2] else left @ right)
    norms = torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right)
    noise = (found.shape[-1] * torch.finfo(F64).eps * norms).unsqueeze(-1)
    return torch.where(found.abs() > noise, found, 0) * left_size.squeeze(-1) * right_size.squeeze(-1)


def negative_share(eigenvalues: Tensor) -> Tensor:
    """The share of eigenvalues with a negative real part among those that are not zero to rounding.

    1/2 for a random H. Near 1 H sharpens: it pushes tokens apart (Dovonon et al. 2025, Fig. 5). Eigenvalues below k·ε
    of the largest count as zero; nan if all do.
    """
    size = eigenvalues.abs()
    counts = size > eigenvalues.shape[-1] * torch.finfo(F64).eps * size.amax(dim=-1, keepdim=True)
    return (counts & (eigenvalues.real < 0)).sum(dim=-1) / counts.sum(dim=-1)


def positive_trace(eigenvalues: Tensor) -> Tensor:
    """Σ Re λ over Re λ > 0."""
    return eigenvalues.real.clamp(min=0).sum(dim=-1)


def negative_trace(eigenvalues: Tensor) -> Tensor:
    """Σ Re λ over Re λ < 0, so at most 0. With `positive_trace` it sums to tr H."""
    return eigenvalues.real.clamp(max=0).sum(dim=-1)


def spectral_radius(eigenvalues: Tensor) -> Tensor:
    """max |λ|."""
    return eigenvalues.abs().amax(dim=-1)


def mean_growth(eigenvalues: Tensor) -> Tensor:
    """max_j |1 + μ_j|: what X → X + AXH multiplies the mean of the tokens by, block for block, in the limit.

    Where attention has no negative eigenvalue (λ_n ≥ 0), tokens become alike if it is above 1: no |1 + λμ| with
    0 ≤ λ < 1 is as large. At 1 or below they do not if λ_n = 0, or if the product is thin: its other eigenvalues are 0
    and give 1 for every λ. Else μ below −2/(1 + λ_n) smooth too (Dovonon et al. 2025; `theory.dominance_of` has the
    exact statement).
    """
    return (1 + eigenvalues).abs().amax(dim=-1)


def asymmetry(left: Tensor, right: Tensor) -> Tensor:
    """‖H − Hᵀ‖_F / (2‖H‖_F) for H = LR: 0 if H is symmetric, 1 if it is skew, √½ for random weights; nan for H = 0.

    From ‖H‖² = tr(LᵀL·RRᵀ) and tr H² = tr (RL)², k × k only. An asymmetry below about 1e-8 is rounding noise.
    """
    square, trace_of_square = _squares(_near_one(left.to(F64))[0], _near_one(right.to(F64))[0])
    return ((square - trace_of_square).clamp(min=0) / (2 * square)).sqrt()


def mimetic_score(left: Tensor, right: Tensor) -> Tensor:
    """tr H / (√d ‖H‖_F), the cosine of H = LR with the identity: −1 for H = −βI, 1 for βI, near 0 for random weights.

    Trained vision models have W_V W_O near −βI and W_Q W_Kᵀ near αI (Trockman & Kolter 2023). A head whose product has
    rank k reaches √(k/d) at most. nan for H = 0.
    """
    left, right = _near_one(left.to(F64))[0], _near_one(right.to(F64))[0]
    square, _ = _squares(left, right)
    trace = (left * right.mT).sum(dim=(-2, -1))
    return trace / (left.shape[-2] * square).sqrt()


def _near_one(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weights over a power of two of the size of the largest, whose fourth powers are safe, and that power."""
    exponent = torch.frexp(weight.abs().amax(dim=(-2, -1), keepdim=True)).exponent
    size = torch.exp2(exponent.double().clamp(-1000, 1000))
    return weight / size, size


def _squares(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """‖LR‖_F² and tr (LR)²."""
    small = right @ left  # (…, k, k)
    return ((left.mT @ left) * (right @ right.mT)).sum(dim=(-2, -1)), (small * small.mT).sum(dim=(-2, -1))
