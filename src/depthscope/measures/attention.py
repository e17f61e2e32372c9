"""What an attention matrix does to the tokens: its gap, its spectrum, its spread.

P is (…, n, n), row-stochastic; for ω, μ and the entropy also an operator whose rows are made some at a time. Tokens X
are (…, n, d) and broadcast against P's leading axes (give X an axis for the heads: `x.unsqueeze(-3)`). `mask` (…, n) is
true for real tokens: rows and columns of padding are left out, and real rows must put no weight on padding. Results are
float64, (…). nan: no real token, or an entry that is not finite.

Row sums are taken to be exactly 1. In float32 they are 1 only to rounding, and the formulas
below do not let that error in: P1 = 1 is used where the paper's algebra uses it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.operators import AttentionOperator
from depthscope.measures.sweeps import survey
from depthscope.measures.tokens import TokenMatrix


class Mu(NamedTuple):
    """μ₁ and μ₂: what P does to the mean and to the deviations of the tokens."""

    mean: Tensor
    diversity: Tensor


def delta(attention: Tensor, mask: Tensor | None = None) -> Tensor:
    """δ = ‖Π⊥P‖₂ (Yu & Zhang 2024, eq. 12): the most that attention can leave of the diversity.

    Exactly 0 for equal rows, so also for one token. At most 1 if P is doubly stochastic; above 1 in
    causal attention, where Thm 2.6 does not apply.
    """
    p = square_rows(attention, mask)
    usable = p.deviation_norm.isfinite()
    scale = torch.where(usable & (p.deviation_norm > 0), p.deviation_norm, 1.0)
    centred = torch.where(usable[..., None, None], p.deviations.double() / scale[..., None, None], 0.0)
    largest = torch.linalg.eigvalsh(centred.mT @ centred)[..., -1].clamp(min=0).sqrt()
    return torch.where(usable, largest * p.deviation_norm, torch.nan)


def second_eigenvalue(attention: Tensor, mask: Tensor | None = None) -> Tensor:
    """|λ₂(P)|, the second largest eigenvalue in modulus (Yu & Zhang 2024, Cor. 2.7).

    Π⊥P = P − 1p̄ᵀ has the eigenvalues of P with the leading 1 replaced by 0 (Wielandt deflation), so
    |λ₂| is its spectral radius: exactly 0 for equal rows, and |λ₂| ≤ δ. A lower triangular (causal)
    P has its diagonal as spectrum, and the general solver is avoided: it is inaccurate there.
    nan for one token, which has no second eigenvalue.
    """
    p = square_rows(attention, mask)
    usable = p.deviation_norm.isfinite() & (p.count > 1)
    triangular = is_triangular(p.values)
    value = largest_on_diagonal(p.values.diagonal(dim1=-2, dim2=-1), p.real)
    general = usable & ~triangular
    if general.any():
        # In float64: nearly defective eigenvalues (local, shifted attention) show the rounding of a float32 centring.
        deviations = TokenMatrix(p.values.double(), p.mask).deviations
        deflated = torch.where(general[..., None, None], deviations, 0.0)
        value = torch.where(general, torch.linalg.eigvals(deflated).abs().amax(dim=-1), value)
    return torch.where(usable, value, torch.nan)


def largest_on_diagonal(diagonal: Tensor, real: Tensor) -> Tensor:
    """|λ₂| of a lower triangular P with this diagonal (…, n): the first real token attends to itself alone, λ₁ = 1."""
    first = real & (real.cumsum(dim=-1) == 1)
    return diagonal.double().abs().masked_fill(first, 0.0).amax(dim=-1)


def is_triangular(p: Tensor) -> Tensor:
    """Whether no token attends to a later one, (…)."""
    ahead = p[..., 0, 1:].any(dim=-1)  # the first token's look says it of most matrices
    return ~(ahead if p.device.type == "cpu" and bool(ahead.all()) else p.triu(1).flatten(-2).any(dim=-1))


def omega(attention: Tensor | AttentionOperator, tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """ω = ‖eᵀPΠ⊥X‖ / ‖eᵀX‖, e = 1/√n (Yu & Zhang 2024, eq. 12): what attention feeds from the
    diversity into the mean. 0 if P is doubly stochastic.

    nan where the mean of X is zero or rounding noise (`TokenMatrix.has_mean`).
    """
    return omega_and_mu(attention, tokens, mask)[0]


def mu(attention: Tensor | AttentionOperator, tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Mu:
    """μ_i = ‖Π_i P X‖_F / ‖Π_i X‖_F, i = 1, 2 (Yu & Zhang 2024, eq. 10).

    μ₁ ≥ 1 − ω and μ₂ ≤ δ (eq. 11). μ₁ is nan where the mean of X is zero or rounding noise, μ₂ where
    the tokens are all equal.
    """
    return omega_and_mu(attention, tokens, mask)[1]


def omega_and_mu(
    attention: Tensor | AttentionOperator, tokens: Tensor | TokenMatrix, mask: Tensor | None = None
) -> tuple[Tensor, Mu]:
    """`omega` and `mu` from one product with P, of rescaled tokens: they are free of scale.

    With P1 = 1, PX = 1x̄ᵀ + PΠ⊥X: the mean is carried over untouched and only the deviations are
    multiplied, so nothing cancels when they are small.
    """
    x = TokenMatrix.of(tokens, mask).rescaled
    if attention.shape[-1] != x.values.shape[-2] or attention.shape[-1] != attention.shape[-2]:
        shapes = f"{tuple(attention.shape)} and {tuple(x.values.shape)}"
        raise ValueError(f"expected attention (…, n, n) over the tokens (…, n, d), got {shapes}")
    p = square_rows(attention, x.mask).values.double() if isinstance(attention, Tensor) else attention
    mixed = TokenMatrix(p @ x.deviations, x.mask)  # P Π⊥X (…, n, d)
    from_diversity = mixed.values.sum(dim=-2) / x.count.unsqueeze(-1)
    fed, mean = (
        x.count.sqrt() * torch.linalg.vector_norm(part, dim=-1) / x.mean_norm
        for part in (from_diversity, x.mean + from_diversity)
    )
    diversity = torch.where(x.deviation_norm > 0, mixed.deviation_norm / x.deviation_norm, torch.nan)
    return torch.where(x.has_mean, fed, torch.nan), Mu(torch.where(x.has_mean, mean, torch.nan), diversity)


def attention_entropy(attention: Tensor | AttentionOperator, mask: Tensor | None = None) -> Tensor:
    """−Σ_j p_ij log p_ij in nats, mean over the real rows: 0 for one-hot rows, log n for uniform ones.

    The only one of these that also takes cross-attention, (…, n, m) with n queries and m keys.
    """
    if not isinstance(attention, Tensor):
        return survey(attention, mask).entropy
    p = TokenMatrix(attention, mask)
    per_row = torch.special.entr(p.values).sum(dim=-1, dtype=torch.float64)  # (…, n)
    return torch.where(p.norm.isfinite(), per_row.sum(dim=-1) / p.count, torch.nan)


def square_rows(attention: Tensor, mask: Tensor | None) -> TokenMatrix:
    """P as a matrix of rows, with rows and columns of padding set to 0."""
    if attention.ndim < 2 or attention.shape[-1] != attention.shape[-2]:
        raise ValueError(f"expected attention matrices (…, n, n), got shape {tuple(attention.shape)}")
    if mask is not None:
        if mask.ndim not in (1, attention.ndim - 1):
            shapes = f"{tuple(mask.shape)} and {tuple(attention.shape)}"
            raise ValueError(f"expected a mask (n) or (…, n) with an axis for the heads, got {shapes}")
        attention = torch.where((mask != 0).unsqueeze(-2).to(attention.device), attention, 0.0)
    return TokenMatrix(attention, mask)
