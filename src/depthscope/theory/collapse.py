"""How fast pure attention makes tokens equal: Thm 2.2, Thm 2.3 and Cor. 3.2 of Dong, Cordonnier & Loukas 2021.

With e = ‖res(X)‖_{1,∞} an attention layer obeys e' ≤ c·e³: doubly exponential in depth, once e < c^(−1/2).
The theorems hold for every centre x of X = 1xᵀ + R, hence for the best one; e here is that of the R given.

What the proof uses of the scores is their range in a row, D_i = max_j E_ij − min_j E_ij, E = R W_QK Rᵀ/√d_qk
(`score_ranges`), and the bound D_i ≤ 2‖W_QK‖₁e²/√d_qk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope.measures import composite_norm
from depthscope.theory.differences import activation_named
from depthscope.theory.residuals import Heads, Mlp, SplitTokens, attend_uncentred, split_scores

PAPER_CONSTANT = 4.0
LARGEST_RANGE = 1.2564312086261697  # the root of e^D − 1 = 2D: the proof's lemma is about D_i ≤ 1.256


@dataclass(frozen=True)
class CollapseBound:
    """What a theorem says of ‖res(SAN(X))‖_{1,∞}; tensors (…)."""

    factor: Tensor  # c
    log_bound: Tensor  # natural logarithm of c^((3^L − 1)/2)·e^(3^L): the bound itself leaves float64 at L ≈ 6
    threshold: Tensor  # c^(−1/2): the residual below which the bound is smaller than the residual
    contracts: Tensor  # e < c^(−1/2): elsewhere the theorem promises nothing

    @property
    def bound(self) -> Tensor:
        """The right-hand side; 0 or infinite where float64 cannot hold it."""
        return self.log_bound.exp()


def collapse_bound(
    residual: Tensor,
    *,
    beta: Tensor | float,
    key_width: int,
    gamma: Tensor | float = 1.0,
    heads: int = 1,
    lipschitz: Tensor | float = 1.0,
    layers: int = 1,
    constant: float = PAPER_CONSTANT,
) -> CollapseBound:
    """‖res(SAN(X))‖ ≤ c^((3^L − 1)/2)·‖res(X)‖^(3^L), c = 4γβHλ/√d_qk (Thm 2.2: H = λ = 1; Thm 2.3: λ = 1; Cor. 3.2).

    β bounds ‖W_QK‖₁‖W_h‖_{1,∞} of every head and layer (`weight_product`), γ that of every layer (`range_evenness`),
    λ the Lipschitz constant of the MLP in the norm ‖·‖_{1,∞} (`lipschitz_bound`). γ = 1 is the paper's first version.

    Residual 0 gives bound 0, and so does c = 0 (logarithm −∞); without layers the bound is the residual. From 647
    layers on 3^L is infinite in float64: the logarithm is then −∞ where the bound contracts, ∞ where it grows.
    """
    for name, value, least in (("layers", layers, 0), ("key_width", key_width, 1), ("heads", heads, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"expected {name} to be a whole number of {least} or more, got {value!r}")
    e = residual.double()
    factor = torch.as_tensor(constant * gamma * beta * heads * lipschitz / math.sqrt(key_width), dtype=e.dtype)
    if bool((factor < 0).any()):
        raise ValueError(f"expected a bound on norms of weights, 0 or more, got a factor c = {factor.min().item():g}")
    threshold = factor.rsqrt()
    return CollapseBound(factor, _log_bound(e.log(), factor.log(), layers), threshold, e < threshold)


def _log_bound(log_e: Tensor, log_c: Tensor, layers: int) -> Tensor:
    """(3^L − 1)/2·log c + 3^L·log e = 3^L(log e + ½ log c) − ½ log c: each layer triples the way from the threshold."""
    if layers == 0:
        return log_e + torch.zeros_like(log_c)
    gone = (log_e == -math.inf) | (log_c == -math.inf)
    distance = torch.where(gone, 0.0, log_e + log_c / 2)
    power = 3.0**layers if layers < 647 else math.inf  # 3^646 is the last that float64 can hold
    tripled = torch.where(distance == 0, distance, power * distance)  # ∞·0 is on the threshold: 0
    return torch.where(gone, -math.inf, tripled - torch.where(gone, 0.0, log_c / 2))


def weight_product(heads: Heads) -> Tensor:
    """β of one layer: the largest ‖W_QK‖₁‖W_h‖_{1,∞} over its heads, W_QK = W_QW_Kᵀ; (…)."""
    return _weight_products(heads).amax(dim=-1)


def _weight_products(heads: Heads) -> Tensor:
    return _column_norm(heads.query @ heads.key.mT) * composite_norm(heads.value)  # (…, h)


def _column_norm(x: Tensor) -> Tensor:
    """‖X‖₁, the largest absolute column sum."""
    return x.abs().sum(dim=-2).amax(dim=-1)


def lipschitz_bound(mlp: Mlp) -> Tensor:
    """λ ≤ ‖W₁‖_{1,∞}·Lip(φ)·‖W₂‖_{1,∞} of an MLP in the composite norm: the norm is submultiplicative; (…)."""
    slope = activation_named(mlp.activation).lipschitz
    return composite_norm(mlp.expand) * slope * composite_norm(mlp.contract)


def score_ranges(tokens: SplitTokens, heads: Heads) -> Tensor:
    """D_i = max_j E_ij − min_j E_ij, (…, h, n): how far row i of the attention can be from what all rows share."""
    varying = split_scores(tokens, heads).varying
    return varying.amax(dim=-1) - varying.amin(dim=-1)


def range_evenness(ranges: Tensor) -> Tensor:
    """γ = √(Σ_i D_i / max_i D_i) ∈ [1, √n]: 1 if one row has all of the range, √n if all rows have the same; (…).

    Later versions of the paper have it, the first one not. nan where all ranges are 0: for equal tokens, and for a head
    whose queries or keys do not tell tokens apart.
    """
    return (ranges.sum(dim=-1) / ranges.amax(dim=-1)).sqrt()


def sharp_constant(ranges: Tensor) -> Tensor:
    """Ours: what may stand in place of the paper's 4γ for one head, min(γ, c₀(D)), D = max_i D_i; (…, n) → (…).

    Row i of R' is Σ_j(p_ij − q_j)r_j, where p_i is q tilted by E_i.

    - ‖p_i − q‖₁ ≤ 2 tanh(D_i/4) ≤ D_i/2. So the row sums of R' are at most ½ max_i D_i·‖R‖_∞, its column sums at most
      ½ Σ_i D_i·‖R‖₁, and their product gives γ·‖W_QK‖₁e²/√d_qk·e: **1 in place of 4, without a condition on D**.
    - The column sums have a second bound. p_ij − q_j is the integral over t ∈ [0, 1] of p^t_ij(E_ij − Σ_m p^t_im E_im),
      p^t_ij ≤ e^(tD)q_j, and Σ_i|E_ij| ≤ ‖R‖₁‖W_QK‖₁‖R‖_∞/√d_qk. So **γ may be left out**, with
      c₀(D) = √((e^D − 1)/D + (e^2D − 1)/(2D)): √2 at D = 0, 2.55 at the paper's D = 1.256, 4 at D = 1.97.

    Equal tokens, D = 0: √2 (γ has no meaning there).
    """
    largest = ranges.amax(dim=-1)
    without_gamma = (_mean_exponential(largest) + _mean_exponential(2 * largest)).sqrt()
    return torch.fmin(range_evenness(ranges), without_gamma)  # fmin: nan counts as missing


def _mean_exponential(d: Tensor) -> Tensor:
    """(e^d − 1)/d, 1 at d = 0."""
    return torch.where(d > 0, torch.expm1(d) / torch.where(d > 0, d, 1.0), 1.0)


@dataclass(frozen=True)
class LayerContraction:
    """One attention layer, measured and bounded; tensors (…)."""

    before: Tensor  # e = ‖R‖_{1,∞}
    after: Tensor  # e' = ‖R'‖_{1,∞}, R' as the proof has it or around the mean, whichever is smaller
    constant: Tensor  # e'/(e³·Σ_h ‖W_QK‖₁‖W_h‖_{1,∞}/√d_qk): what was needed where the theorem has 4γ
    gamma: Tensor  # the largest over the heads that have a range; nan if none has
    largest_range: Tensor  # max D_i over rows and heads
    applies: Tensor  # max D_i ≤ 1.256: what the paper's proof needs
    sharp: Tensor  # what our proof allows there: `sharp_constant` for one head, its sum over heads for several
    paper: CollapseBound  # Thm 2.2 or 2.3 for this one layer, with γ


def layer_contraction(tokens: SplitTokens, heads: Heads) -> LayerContraction:
    """What one layer does to the residual, beside what Thm 2.2 (one head) or 2.3 says of it.

    The heads enter the measured constant by the sum of their ‖W_QK‖₁‖W_h‖, at most Hβ. nan for equal tokens.

    A head without a range (all D_i = 0) gives all rows the same attention and adds nothing to R'. It has no γ, and that
    of the layer is the largest of the others'. If no head has one, R' = 0: γ is nan, and the paper's bound is taken
    with γ = 1, the least that it can be.

    ‖·‖_{1,∞} does not satisfy the triangle inequality, so heads cannot be added in it. What we prove of several heads
    adds their column sums and their row sums: e' ≤ √(Σ_h s_h²u_h‖W_h‖₁ · Σ_h u_h‖W_h‖_∞)·e³/√d_qk, u = ‖W_QK‖₁,
    s = `sharp_constant`. For heads whose W_h have the same ratio ‖·‖₁/‖·‖_∞ this is Thm 2.3 with s in place of 4γ.
    """
    width = heads.key.shape[-1]
    before, attended = composite_norm(tokens.residual), attend_uncentred(tokens, heads).residual
    after = torch.minimum(composite_norm(attended), composite_norm(attended - attended.mean(dim=-2, keepdim=True)))
    ranges = score_ranges(tokens, heads)  # (…, h, n)
    gammas = range_evenness(ranges)  # (…, h)
    known = gammas.nan_to_num(nan=0.0).amax(dim=-1)
    gamma = torch.where(known > 0, known, torch.nan)
    products = _weight_products(heads)
    u = _column_norm(heads.query @ heads.key.mT)  # (…, h)
    columns = (sharp_constant(ranges).square() * u * _column_norm(heads.value)).sum(dim=-1)
    rows = (u * _column_norm(heads.value.mT)).sum(dim=-1)
    largest = ranges.amax(dim=(-2, -1))
    # After and before in this order: e³ alone leaves float64 at 1e-103.
    constant = after / before / before / before / products.sum(dim=-1) * math.sqrt(width)
    return LayerContraction(
        before=before,
        after=after,
        constant=constant,
        gamma=gamma,
        largest_range=largest,
        applies=largest <= LARGEST_RANGE,
        sharp=(columns * rows).sqrt() / products.sum(dim=-1),
        paper=collapse_bound(
            before, beta=products.amax(dim=-1), key_width=width, gamma=known.clamp(min=1.0), heads=products.shape[-1]
        ),
    )
