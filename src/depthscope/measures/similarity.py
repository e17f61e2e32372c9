"""How alike the tokens of a sequence are, and how a step changes that.

Yu & Zhang 2024, "Why 'classic' Transformers are shallow and how to make them go deep"
(arXiv 2312.06182). Notation: Π₁ = 11ᵀ/n projects onto equal tokens, Π⊥ = I − Π₁.

Unless a docstring says otherwise: X is (…, n, d), `mask` (…, n) is true for real tokens, results
are float64 of shape (…), and a number without meaning is nan: no real token, a zero matrix, or a
real token with an entry that is not finite.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures.norms import Scratch, TokenNorms, norm_of_rows, with_arithmetic
from depthscope.measures.tokens import TokenMatrix, Tokens, norms_of

ALIKE = 0.9  # nine tenths of the energy are the mean: what is left of the tokens is a third of its size, √(1/9)
EQUAL = 0.99  # tokens differ by a tenth of their size, √(1/99): later blocks see one token


class Growth(NamedTuple):
    """ξ₁ and ξ₂ of a step: how the energy of the mean and of the deviations grows."""

    mean: Tensor
    diversity: Tensor


class DirectionSimilarity(NamedTuple):
    """Similarity of directions, with the tokens that were left out of it."""

    similarity: Tensor  # (…)
    outliers: Tensor  # (…, n), true for real tokens left out because of their norm


def token_similarity(tokens: Tokens, mask: Tensor | None = None) -> Tensor:
    """t_sim(X) = ‖Π₁X‖_F² / ‖X‖_F² ∈ [0, 1] (Yu & Zhang 2024, Def. 1.1).

    1 if and only if all tokens are equal; independent random tokens give about 1/n. One token gives
    1, as the definition says. One huge token hides a collapse: see `direction_similarity`.
    """
    x = norms_of(tokens, mask)
    return (x.mean_norm / x.norm).square()


def token_diversity(tokens: Tokens, mask: Tensor | None = None) -> Tensor:
    """t_div(X) = ‖Π⊥X‖_F² / ‖X‖_F² ∈ [0, 1] (Yu & Zhang 2024, Def. 1.1).

    Computed from the centred tokens, never as 1 − t_sim: exactly 0 for identical tokens, and
    accurate however small it is.
    """
    x = norms_of(tokens, mask)
    return (x.deviation_norm / x.norm).square()


def frequency_ratio(tokens: Tokens, mask: Tensor | None = None) -> Tensor:
    """‖HFC[X]‖_F / ‖LFC[X]‖_F = ‖Π⊥X‖_F / ‖Π₁X‖_F (Wang et al. 2022; Dovonon et al. 2025).

    t_sim = 1 / (1 + ratio²). nan where the mean is zero or rounding noise, as after a mean no larger than the
    deviations was subtracted in the tokens' format (`TokenNorms.has_mean`).
    """
    x = norms_of(tokens, mask)
    return torch.where(x.has_mean, x.deviation_norm / x.mean_norm, torch.nan)


def cosine_similarity(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """t_cos(X) = mean of cos(x_i, x_j) over all pairs i < j (Yu & Zhang 2024, eq. 1).

    In O(nd), without the n × n matrix: for the m unit tokens U, Σ_{i≠j} u_iᵀu_j = ‖Σu_i‖² − m, hence
    t_cos = 1 − m/(m−1) · t_div(U), which is exactly 1 for equal directions.
    Zero tokens have no direction and are left out; with fewer than two tokens left it is nan.
    """
    return mean_cosine(TokenMatrix.of(tokens, mask).directions.norms)


def mean_cosine(directions: TokenNorms) -> Tensor:
    """t_cos from the norms of the unit tokens."""
    m = directions.count
    return torch.where(m > 1, 1 - m / (m - 1) * token_diversity(directions), torch.nan)


def direction_similarity(tokens: Tensor | TokenMatrix, mask: Tensor | None = None) -> DirectionSimilarity:
    """t_sim of the unit tokens, without outliers: the number to trust when one token is huge.

    Tokens with more than `OUTLIER_FACTOR` times the median norm are left out and reported. 127 equal
    tokens and one of 100 times their norm have t_sim = 0.02; here they give 1 and name the one.
    Zero tokens have no direction and are left out too, but are no outliers.
    Ours; after what trained language models show (attention sinks, massive activations).
    """
    x = TokenMatrix.of(tokens, mask)
    return DirectionSimilarity(token_similarity(directions_without_outliers(x)), x.outliers)


def directions_without_outliers(x: TokenMatrix) -> TokenNorms:
    """The norms of the unit tokens whose tokens are no outliers."""
    unit = x.directions
    return TokenMatrix(unit.values, unit.real & ~x.outliers).norms if x.has_outliers else unit.norms


def angular_distance(before: Tensor | TokenMatrix, after: Tensor | TokenMatrix, mask: Tensor | None = None) -> Tensor:
    """Mean over the tokens of ∠(x_i, y_i)/π ∈ [0, 1]: how far a block turns its tokens (Gromov et al. 2024).

    Tokens that are zero before or after have no direction and are left out; nan if none is left.
    A small distance does not prove that a block can be skipped.
    """
    x, y = TokenMatrix.of(before, mask), TokenMatrix.of(after, mask)
    if x.values.shape != y.values.shape:
        raise ValueError(f"expected two matrices of one shape, got {tuple(x.values.shape)} and {tuple(y.values.shape)}")
    u, v = x.directions, y.directions
    return mean_angle(u.values, v.values, u.real & v.real) / torch.pi


def mean_angle(u: Tensor, v: Tensor, real: Tensor | None = None, scratch: Scratch | None = None) -> Tensor:
    """Mean of ∠(u_i, v_i) over the real ones of unit tokens, in radians.

    2·arcsin(‖u − v‖/2): accurate for small angles, where arccos of a cosine near 1 is not (and less so,
    to √ε, for opposite directions).
    """
    u, v = with_arithmetic(u), with_arithmetic(v)
    difference = u - v if scratch is None else torch.sub(u, v, out=scratch.take("work", u))
    angles = 2 * torch.arcsin((norm_of_rows(difference) / 2).clamp(max=1))  # (…, n)
    return angles.mean(dim=-1) if real is None else torch.where(real, angles, 0.0).sum(dim=-1) / real.sum(dim=-1)


def growth(before: Tokens, after: Tokens, mask: Tensor | None = None) -> Growth:
    """ξ_i = ‖Π_i Y‖_F² / ‖Π_i X‖_F², i = 1, 2, of the step X → Y (Yu & Zhang 2024, eq. 7).

    ξ₁ is nan where the mean of X is zero or rounding noise (after de-escalation with τ = 1; see
    `TokenMatrix.has_mean`), ξ₂ where the tokens of X are all equal; both where float64 cannot hold them.
    X and Y need the same tokens, not the same width.
    """
    x, y = _step(before, after, mask)
    return Growth(
        mean=torch.where(x.has_mean, _finite_square(y.mean_norm / x.mean_norm), torch.nan),
        diversity=torch.where(x.deviation_norm > 0, _finite_square(y.deviation_norm / x.deviation_norm), torch.nan),
    )


def escalation_rate(before: Tokens, after: Tokens, mask: Tensor | None = None) -> Tensor:
    """r(X, Y) = t_div(X) / t_div(Y) (Yu & Zhang 2024, eq. 5); r > 1: the step makes tokens more alike.

    r = 1 + (ξ₁/ξ₂ − 1) t_sim(X) (Prop. 2.3). nan where the tokens of Y are all equal: the rate has no
    finite value there, and Def. 2.2 excludes it. nan also where float64 cannot hold it.
    """
    x, y = _step(before, after, mask)
    # A ratio of norms, so that diversities below the smallest float64 still have a rate; first within X and
    # within Y, whose sizes may be far apart.
    ratio = (x.deviation_norm / x.norm) / (y.deviation_norm / y.norm)
    return torch.where(y.deviation_norm > 0, _finite_square(ratio), torch.nan)


def _finite_square(ratio: Tensor) -> Tensor:
    """ratio², nan where it is infinite."""
    square = ratio.square()
    return square + 0 * square


def _step(before: Tokens, after: Tokens, mask: Tensor | None) -> tuple[TokenNorms, TokenNorms]:
    x, y = norms_of(before, mask), norms_of(after, mask)
    if x.tokens != y.tokens:
        raise ValueError(f"expected two matrices of the same tokens, got {x.tokens} and {y.tokens} tokens")
    return x, y
