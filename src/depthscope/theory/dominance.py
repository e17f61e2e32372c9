"""Which eigenvalues dominate a deep stack of one attention step, and what becomes of its tokens (Dovonon et al. 2025).

The step X → X + AXH, with row-stochastic attention A (n, n) and H = W_V W_O (d, d) for row vectors, is repeated. On
vec(X) it acts as I + Hᵀ⊗A, whose eigenvalues are γ_ij = 1 + λ_i μ_j with λ those of A and μ those of H: n + d
eigenvalues are computed, never those of the nd × nd matrix. With the eigenvectors of both,

    X_L = Σ_ij c_ij γ_ij^L a_i h_jᵀ,

so that the pairs with the largest |γ_ij| decide what the tokens become. Three ends are told apart, each weaker than
the one before it: *input convergence* (all tokens become equal), *angle convergence* (they all point one way), and
*rank collapse* (they lie on one line).

The paper takes the spectrum of A to be real. Softmax attention has complex eigenvalues as a rule, and causal attention
has its diagonal: nothing here assumes a real spectrum. What is assumed is a generic X_0 (no c_ij is zero), one A and
one H in all blocks, no norm and no FFN. Attention that changes from block to block is beyond it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TIE = 1e-9  # moduli that agree to this, relative to the largest, dominate together
DEFECTIVE = 1e10  # condition of the eigenvectors beyond which a closed form keeps fewer than 6 of 16 digits


@dataclass(frozen=True)
class Dominance:
    """What a generic X_0 becomes under X → X + AXH, repeated."""

    pairs: tuple[tuple[int, int], ...]  # (i, j), from 0, of the dominating γ_ij; λ_0 is the eigenvalue 1 of A
    modulus: float  # |γ| of these
    rate: float  # max|γ_ij| over i ≥ 1 by max_j|γ_0j|: below 1, ‖HFC‖/‖LFC‖ shrinks by it per block; above 1 it does
    # not grow for ever, since modes of an unsymmetric A have a mean of their own
    input_convergence: bool
    angle_convergence: bool | None  # None: it depends on X_0
    rank: int | None  # in the limit, after scaling; 0 if all vanishes; None: Jordan blocks

    @property
    def rank_collapse(self) -> bool:
        """Whether the tokens come to lie on one line."""
        return self.rank == 1


def pair_eigenvalues(attention_eigenvalues: Tensor, weight_eigenvalues: Tensor) -> Tensor:
    """γ_ij = 1 + λ_i μ_j, the eigenvalues of I + Hᵀ⊗A: (…, n) and (…, d) → (…, n, d), complex."""
    return 1 + attention_eigenvalues.unsqueeze(-1) * weight_eigenvalues.unsqueeze(-2)


def mean_wins(attention_eigenvalue: Tensor, weight_eigenvalue: Tensor) -> Tensor:
    """Whether |1 + μ| > |1 + λμ|: for this μ the mean of the tokens outgrows the mode of λ (|λ| ≤ 1, λ ≠ 1).

    For real λ it is the exact form of the paper's condition: |μ + 1/(1+λ)| > 1/(1+λ), outside a disc in the left half
    plane that touches 0. So λ wins for real μ between −2/(1+λ) and 0; a *more* negative H smooths again. It is computed
    from the difference |1+μ|² − |1+λμ|² = 2 Re((1−λ)μ) + (1−|λ|²)|μ|², which does not cancel at small μ.
    """
    lam, mu = torch.broadcast_tensors(attention_eigenvalue, weight_eigenvalue)
    lam, mu = lam.to(torch.complex128), mu.to(torch.complex128)
    return 2 * ((1 - lam) * mu).real + (1 - lam.abs() ** 2) * mu.abs() ** 2 > 0


def dominance_of(attention: Tensor, weights: Tensor, *, tie: float = TIE) -> Dominance:
    """The dominating pairs of X → X + AXH, and which of the three convergences follows for a generic X_0.

    `attention` (n, n) row-stochastic, `weights` H (d, d). The table of the paper, with what it leaves out: complex
    pairs (a conjugate pair of λ and one of μ is of rank 2), causal A, ties, singular H (all γ of a zero μ are 1, so
    that ker H stays as it was). The limiting rank is the largest number of dominating pairs of which no two share an i
    or a j: it is the rank of a matrix with generic entries at these places.

    One token is its own mean: it converges in every sense. Where dominating eigenvectors coincide (a Jordan block, such
    as a nilpotent H), powers of L decide which eigenvalues do not show: rank and angle are None.
    """
    _check(attention, weights)
    lam, modes = _spectrum_of_attention(attention.to(torch.float64))
    mu, directions = torch.linalg.eig(weights.to(torch.float64))
    moduli = pair_eigenvalues(lam, mu).abs()  # (n, d)
    mean, other = moduli[0].max().item(), moduli[1:].max().item() if len(lam) > 1 else 0.0
    top = max(mean, other)
    if top == 0:
        return Dominance((), 0.0, float("nan"), False, None, 0)
    dominating = [(i, j) for i, j in torch.nonzero(moduli >= (1 - tie) * top).tolist()]
    is_mean = all(i == 0 for i, _ in dominating)
    defective = _coincide(modes, {i for i, _ in dominating}) or _coincide(directions, {j for _, j in dominating})
    rank = _generic_rank(dominating, moduli.shape)
    angle = True if is_mean else None if defective else False
    if not is_mean and not defective and rank <= 1:
        angle = _signs(attention, dominating, modes, moduli, tie)
    return Dominance(
        pairs=tuple(dominating),
        modulus=top,
        rate=other / mean if mean > 0 else float("inf"),
        input_convergence=is_mean,
        angle_convergence=angle,
        rank=None if defective and not is_mean else rank,
    )


def tokens_after(tokens: Tensor, attention: Tensor, weights: Tensor, depth: int) -> Tensor:
    """X_L of X → X + AXH in closed form: V_A((V_A⁻¹XV_H) ∘ γ^L)V_H⁻¹, (n, d) float64, at a cost free of L.

    Refused where A or H has no usable basis of eigenvectors (causal attention over many tokens has an ill-conditioned
    one; a nilpotent H has none): there, repeat the step. Beyond what float64 holds the result is inf or 0, as the
    repeated step's is.
    """
    _check(attention, weights)
    (lam, a), (mu, h) = torch.linalg.eig(attention.to(torch.float64)), torch.linalg.eig(weights.to(torch.float64))
    for name, vectors in (("attention", a), ("weights", h)):
        if not (condition := torch.linalg.cond(vectors).item()) < DEFECTIVE:
            raise ValueError(
                f"expected {name} with independent eigenvectors, got a basis of condition {condition:.0e}: the closed "
                "form would be rounding noise; repeat the step X + AXH instead"
            )
    coefficients = torch.linalg.solve(a, tokens.to(a.dtype)) @ h
    grown = coefficients * pair_eigenvalues(lam, mu) ** depth
    return torch.linalg.solve(h, a @ grown, left=False).real


def _check(attention: Tensor, weights: Tensor) -> None:
    for name, matrix in (("attention", attention), ("weights", weights)):
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
            raise ValueError(f"expected square {name}, got {tuple(matrix.shape)}")
        if not matrix.isfinite().all():
            raise ValueError(f"expected finite {name}, got nan or inf in it")
    sums = attention.double().sum(dim=-1)
    off = (sums - 1).abs().max().item()
    if off > 1e-4 or attention.min() < 0:
        raise ValueError(f"expected row-stochastic attention, got rows that sum to 1 ± {off:.0e} or negative entries")


def _spectrum_of_attention(attention: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and right eigenvectors of A, with the eigenvalue 1 first, whose eigenvector is **1** exactly."""
    values, vectors = torch.linalg.eig(attention)
    order = (values - 1).abs().argsort()
    values, vectors = values[order], vectors[:, order]
    values[0], vectors[:, 0] = 1, len(values) ** -0.5
    return values, vectors


def _coincide(vectors: Tensor, chosen: set[int]) -> bool:
    """Whether these eigenvectors (unit columns) are dependent to rounding."""
    return torch.linalg.svdvals(vectors[:, sorted(chosen)])[-1].item() < 1 / DEFECTIVE**0.5


def _signs(
    attention: Tensor, dominating: list[tuple[int, int]], modes: Tensor, moduli: Tensor, tie: float
) -> bool | None:
    """Whether tokens that end on one line all end on the same side of 0, where the mean does not dominate alone.

    Together with the mean it depends on X_0. Without it the tokens that A always returns to, weighted by A's left
    eigenvector π, sum to 0: if two of them are reached they have both signs. In causal attention that is the first
    token alone. There the signs are those of the mode, and tokens that no dominating mode reaches follow the strongest
    that does: to the same line, on a side that depends on X_0, or to another.
    """
    chosen = sorted({i for i, _ in dominating})
    if 0 in chosen:
        return None
    reach = modes.abs() > 1e-9  # (n, modes)
    reached = reach[:, chosen].any(dim=1)
    if (reached & (_stationary(attention) > 1e-9)).sum() > 1:
        return False
    if len(chosen) > 1:
        return None
    parts = modes[reached, chosen[0]]
    if ((parts / parts[0]).real < 0).any():
        return False
    columns = {j for _, j in dominating}
    for token in torch.nonzero(~reached).flatten().tolist():
        felt = moduli[reach[token]]
        if {j for _, j in torch.nonzero(felt >= (1 - tie) * felt.max()).tolist()} != columns:
            return False
    return None


def _stationary(attention: Tensor) -> Tensor:
    """π with πA = π, the limit of the mean row of A^k: where attention always returns to."""
    power = attention.to(torch.float64)
    for _ in range(40):
        power = power @ power
        power = power / power.sum(dim=-1, keepdim=True)
    return power.mean(dim=0)


def _generic_rank(pairs: list[tuple[int, int]], shape: torch.Size) -> int:
    """The rank of a matrix whose entries at `pairs` are generic and zero elsewhere, such as random ones."""
    entries, (rows, columns) = torch.zeros(shape, dtype=torch.float64), zip(*pairs, strict=True)
    entries[list(rows), list(columns)] = 0.5 + torch.rand(
        len(pairs), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return int(torch.linalg.matrix_rank(entries))
