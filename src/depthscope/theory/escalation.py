"""How much one attention step Y = X + α[P₁XW₁ … P_hXW_h] makes the tokens alike (Yu & Zhang 2024).

Everything here holds for **random weights**: the elements of W are independent with mean 0 and variance
σ²; `gain` is dσ². In trained weights W is not independent of X, and the numbers are a reference, not a
prediction.

Attention P is (…, n, n), or (…, h, n, n) with one axis more than the tokens X (…, n, d): h heads, whose
W_k are d × d/h (Prop. 2.9). Results are float64, (…). Without a mean (`TokenMatrix.has_mean`) or with
equal tokens they are nan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures import Growth, TokenMatrix, delta, mu, second_eigenvalue, token_similarity
from depthscope.measures.attention import Mu, omega_and_mu


@dataclass(frozen=True)
class Bound:
    """Thm 2.6's lower bound on E[r], and whether its conditions hold."""

    rate: Tensor  # the right-hand side of (16)
    omega: Tensor  # with several heads: 1 − √(mean of (1 − ω_k)²)
    delta: Tensor  # with several heads: √(mean of δ_k²)
    slack: Tensor  # the left-hand side of (15), which must be bounded away from 0
    applies: Tensor  # ω + δ < 1; where false, the theorem says nothing
    margin: Tensor  # Δ − E[η] to second order: what the proof needs to be ≥ 0, and only promises for large d


def expected_growth(attention: Tensor, tokens: Tensor, *, alpha: float = 1.0, gain: float = 1.0) -> Growth:
    """E[ξ_i] = 1 + α² dσ² μ̄_i² (Lemma 2.4, eq. 9; Lemma A.6, eq. 29, for heads)."""
    squares = _mean_squares(mu(*_heads(attention, tokens)))
    return Growth(*(1 + alpha**2 * gain * square for square in squares))


def expected_eta(attention: Tensor, tokens: Tensor, *, alpha: float = 1.0, gain: float = 1.0) -> Tensor:
    """E[η] = E[ξ₁]/E[ξ₂] − E[ξ₁/ξ₂] to second order, for Gaussian W. Ours; the paper only shows that it is small.

    E[ξ₁/ξ₂] ≈ E₁/E₂ + E₁V₂₂/E₂³ − V₁₂/E₂². With B_i = αΠ_iP_kX/‖Π_iX‖ and A_i = Π_iX/‖Π_iX‖ (columns of
    head k), G_i = B_iᵀB_i and C_i = B_iᵀA_i, the covariances are
    V_ij = Σ_k 4σ²⟨C_i, C_j⟩ + 2σ⁴(d/h)⟨G_i, G_j⟩: the odd moments of a Gaussian vanish.
    """
    growth = expected_growth(attention, tokens, alpha=alpha, gain=gain)
    return _second_order(growth, *_covariances(*_heads(attention, tokens), alpha, gain))


def _second_order(expected: Growth, v12: Tensor, v22: Tensor) -> Tensor:
    e1, e2 = expected
    return v12 / e2**2 - e1 * v22 / e2**3


def expected_rate(attention: Tensor, tokens: Tensor, *, alpha: float = 1.0, gain: float = 1.0) -> Tensor:
    """E[r(X, Y)] by (13) and (18), with E[η] to second order."""
    growth = expected_growth(attention, tokens, alpha=alpha, gain=gain)
    ratio = growth.mean / growth.diversity
    ratio = ratio - _second_order(growth, *_covariances(*_heads(attention, tokens), alpha, gain))
    return 1 + (ratio - 1) * token_similarity(tokens)


def lower_bound(attention: Tensor, tokens: Tensor, *, alpha: float = 1.0) -> Bound:
    """E[r] ≥ 1 + α²/(1 + α²δ²)·((1 − ω)² − δ²)·t_sim(X) (Thm 2.6, eq. 16), for dσ² = 1.

    The theorem as printed asks for a sub-gaussian *norm* of 1/√d. That is not enough: its proof uses a
    *variance* of 1/d. Gaussian weights of sub-gaussian norm 1/√d have variance 3/(8d), and violate (16).
    It also holds only "for d sufficiently large": `margin` is what it needs at this d.
    """
    p, x = _heads(attention, tokens)
    (omegas, mus), deltas = omega_and_mu(p, x), delta(p)  # (…, h)
    mean_part, gap = (1 - omegas).square().mean(dim=-1), deltas.square().mean(dim=-1)
    mu1, mu2 = _mean_squares(mus)
    growth = Growth(1 + alpha**2 * mu1, 1 + alpha**2 * mu2)
    factor = alpha**2 / (1 + alpha**2 * gap) * (mean_part - gap)
    excess = alpha**2 / (1 + alpha**2 * mu2) * (mu1 - mu2) - factor  # the proof's Δ
    return Bound(
        rate=1 + factor * token_similarity(tokens),
        omega=1 - mean_part.sqrt(),
        delta=gap.sqrt(),
        slack=torch.maximum(mu1 - mean_part, gap - mu2),
        applies=(omegas + deltas < 1).all(dim=-1),
        margin=excess - _second_order(growth, *_covariances(p, x, alpha, 1.0)),
    )


def spectral_estimate(attention: Tensor, tokens: Tensor, *, alpha: float = 1.0) -> Tensor:
    """1 + α²(1 − |λ₂|²)/(1 + α²|λ₂|²)·t_sim(X) (Cor. 2.7, eq. 17, with α).

    A lower bound for symmetric P; for others an estimate, which the paper finds closer than (16).
    """
    p, _ = _heads(attention, tokens)
    square = second_eigenvalue(p).square().mean(dim=-1)
    return 1 + alpha**2 * (1 - square) / (1 + alpha**2 * square) * token_similarity(tokens)


def eta(observed: Growth, expected: Growth) -> Tensor:
    """η = E[ξ₁]/E[ξ₂] − ξ₁/ξ₂ of one draw of the weights (eq. 14)."""
    return expected.mean / expected.diversity - observed.mean / observed.diversity


def gamma(expected: Growth) -> Tensor:
    """γ = E[ξ₂]² / (E[ξ₁] + 2E[ξ₂]) (eq. 24): |η| ≥ t ∈ [0, 1] needs some |ξ_i − E[ξ_i]| ≥ γt (eq. 23)."""
    return expected.diversity.square() / (expected.mean + 2 * expected.diversity)


def asymptotic_rate(alpha: float = 1.0, gain: float = 1.0) -> float:
    """t_div shrinks by 1/(1 + α²dσ²) per block once tokens are nearly equal (Remark 2.8): ½ at α = 1."""
    return 1 / (1 + alpha**2 * gain)


def expected_pre_norm_energy(
    attention: Tensor, tokens: Tensor, normed: Tensor, *, alpha: float = 1.0, gain: float = 1.0
) -> Tensor:
    """E‖Y‖_F² = ‖X‖_F² + α²dσ²‖P X̂‖_F² of the pre-norm step Y = X + αP(X̂)X̂W (eq. 20; heads averaged)."""
    p, x_hat = _heads(attention, normed)
    mixed = (p.double() @ x_hat.double()).square().sum(dim=(-2, -1)).mean(dim=-1)
    return TokenMatrix(tokens).norm.square() + alpha**2 * gain * mixed


def _heads(attention: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """P (…, h, n, n) and X (…, 1, n, d)."""
    if attention.ndim not in (tokens.ndim, tokens.ndim + 1):
        shapes = f"{tuple(attention.shape)} and {tuple(tokens.shape)}"
        raise ValueError(f"expected attention (…, n, n) or (…, h, n, n) over tokens (…, n, d), got {shapes}")
    return attention.unsqueeze(-3) if attention.ndim == tokens.ndim else attention, tokens.unsqueeze(-3)


def _mean_squares(of_heads: Mu) -> tuple[Tensor, Tensor]:
    mean, diversity = of_heads  # (…, h)
    return mean.square().mean(dim=-1), diversity.square().mean(dim=-1)


def _covariances(p: Tensor, x: Tensor, alpha: float, gain: float) -> tuple[Tensor, Tensor]:
    """V₁₂ = Cov(ξ₁, ξ₂) and V₂₂ = Var(ξ₂)."""
    tokens = TokenMatrix(x.double())
    (h, n), d = (p.shape[-3], p.shape[-1]), x.shape[-1]
    m1, m2 = tokens.mean_norm.square(), tokens.deviation_norm.square()  # (…, 1)
    mixed = p.double() @ tokens.deviations  # P Π⊥X (…, h, n, d)
    mean = tokens.mean + mixed.mean(dim=-2)  # ȳ: the mean of PX (…, h, d)
    spread = mixed - mixed.mean(dim=-2, keepdim=True)  # D = Π⊥PX (…, h, n, d)
    own_mean = tokens.mean.unflatten(-1, (h, d // h)).squeeze(-3)  # x̄, columns of each head (…, h, d/h)
    own = tokens.deviations.squeeze(-3).unflatten(-1, (h, d // h)).transpose(-3, -2)  # Π⊥X likewise (…, h, n, d/h)

    along_mean = (spread @ mean.unsqueeze(-1)).squeeze(-1)  # Dȳ (…, h, n)
    along_own = (own @ own_mean.unsqueeze(-1)).squeeze(-1)  # (…, h, n)
    g12 = n * along_mean.square().sum(dim=-1) / (m1 * m2)
    g22 = (spread @ spread.mT).square().sum(dim=(-2, -1)) / m2**2
    c12 = n * (along_mean * along_own).sum(dim=-1) / (m1 * m2)
    c22 = (spread.mT @ own).square().sum(dim=(-2, -1)) / m2**2
    variance = gain / d
    linear, quadratic = 4 * variance * alpha**2, 2 * variance**2 * alpha**4 * (d / h)
    return (linear * c12 + quadratic * g12).sum(dim=-1), (linear * c22 + quadratic * g22).sum(dim=-1)
