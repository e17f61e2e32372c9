"""Which token x is nearest to all tokens: res(X) = X − 1xᵀ with x = argmin ‖X − 1xᵀ‖ (Dong et al. 2021, §2).

Exact: ‖·‖₁, which the medians of the columns minimise, each column for itself. Bracketed with a certificate: ‖·‖_∞,
the smallest ball of the ℓ₁ norm around all tokens, a convex problem whose dual is a lower bound at every step; and
the composite norm √(‖·‖₁‖·‖_∞), which is not convex, by a family of convex problems.

The mean needs no search: in each of the three norms it is at most 2(1 − 1/n) times the least (`mean_factor`).
Tokens X (…, n, d), any leading axes; results (…), float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from depthscope.measures import TokenMatrix, composite_norm

GRID = 17  # values of t
RATE = 3.0  # of the weights: among 0.3, 1, 3 and 8, the one with the narrowest brackets after 400 steps


class Bracket(NamedTuple):
    """The least ‖X − 1xᵀ‖ over all x lies between `low` and `high`; `centre` is an x that attains `high`."""

    low: Tensor  # (…)
    high: Tensor  # (…)
    centre: Tensor  # (…, d)


def mean_factor(n: int) -> float:
    """2(1 − 1/n): how much the mean of n tokens can cost in place of the best x, in ‖·‖₁, ‖·‖_∞ and ‖·‖_{1,∞}.

    ‖x_i − x̄‖ ≤ (1/n)Σ_j‖x_i − x_j‖ ≤ (1 − 1/n)·(largest distance), and no x is nearer to both ends than half of it;
    for ‖·‖₁ the same sum over the entries of a column. For the composite norm, the product of the two. 0 for one token.
    """
    return 2 * (1 - 1 / n)


def column_centre(tokens: Tensor) -> Bracket:
    """The least ‖X − 1xᵀ‖₁ = max_j Σ_i|x_ij − x_j|, exactly: x_j = the median of column j."""
    return _with_mean(tokens, _column_centre)


def row_centre(tokens: Tensor, *, steps: int = 400) -> Bracket:
    """The least ‖X − 1xᵀ‖_∞ = max_i ‖x_i − x‖₁, bracketed.

    For any weights p ≥ 0 of the tokens with sum 1, Σ_i p_i‖x_i − x‖₁ ≤ max_i‖x_i − x‖₁, and the weighted medians of
    the columns minimise the left side: a lower bound for each p. Half of the largest distance between two tokens is
    another. p moves towards the tokens that are farthest; the bracket is a few per cent wide after 400 steps, and its
    width falls like the root of the steps.
    """
    return _with_mean(tokens, lambda r: _row_centre(r, steps))


def composite_centre(tokens: Tensor, *, steps: int = 400) -> Bracket:
    """The least ‖X − 1xᵀ‖_{1,∞}, bracketed.

    √(fg) = min_t ½(t·f + g/t), f = ‖·‖₁ and g = ‖·‖_∞, with the least at t = √(g/f). For each t the right side is a
    convex problem as in `row_centre`. On a grid of log t with spacing Δ that covers every t which the best x can have,
    the least of the lower bounds, divided by cosh(Δ/2), is a lower bound of √(fg) for every x. The cosh costs less
    than 0.1 %; the rest of the bracket is what `steps` leave.
    """
    return _with_mean(tokens, lambda r: _composite_centre(r, steps))


def _with_mean(tokens: Tensor, search: Callable[[Tensor], Bracket]) -> Bracket:
    """Searches in the deviations from the mean, where nothing large cancels, scaled to size 1."""
    matrix = TokenMatrix(tokens)
    deviations = matrix.deviations.double()
    size = deviations.abs().amax(dim=(-2, -1))
    scale = torch.where(size > 0, size, 1.0)
    low, high, centre = search(deviations / scale[..., None, None])
    return Bracket(low * scale, high * scale, matrix.mean + centre * scale.unsqueeze(-1))


def _column_centre(r: Tensor) -> Bracket:
    median = r.median(dim=-2).values
    least = (r - median.unsqueeze(-2)).abs().sum(dim=-2).amax(dim=-1)
    return Bracket(least, least, median)


def _row_centre(r: Tensor, steps: int) -> Bracket:
    zero, one = (torch.full(r.shape[:-2], float(share), dtype=r.dtype, device=r.device) for share in (0, 1))
    found = _balanced_centre(r, zero, one, steps)
    return Bracket(torch.maximum(found.low, _diameter(r) / 2).clamp(max=found.high), found.high, found.centre)


def _composite_centre(r: Tensor, steps: int) -> Bracket:
    columns, rows, at_mean = _column_centre(r).low, _row_centre(r, steps).low, composite_norm(r)
    equal = at_mean == 0
    columns, rows, at_mean = (torch.where(equal, 1.0, norm) for norm in (columns, rows, at_mean))
    # The best x has ‖·‖₁ ≥ columns, ‖·‖_∞ ≥ rows and a product of at most at_mean²: this is where its t² lies.
    first, last = (rows / at_mean).log(), (at_mean / columns).log()  # of log t
    gap = (last - first) / (GRID - 1)
    t = (first + gap * torch.arange(GRID, dtype=r.dtype, device=r.device).view(-1, *[1] * first.ndim)).exp()
    found = _balanced_centre(r.expand(GRID, *r.shape), t / 2, 1 / (2 * t), steps)
    low = found.low.amin(dim=0) / torch.cosh(gap / 2)
    centres = torch.cat([found.centre, torch.zeros_like(found.centre[:1])])  # and the mean
    high, best = composite_norm(r - centres.unsqueeze(-2)).min(dim=0)
    centre = centres.gather(0, best[None, ..., None].expand(1, *centres.shape[1:])).squeeze(0)
    return Bracket(torch.where(equal, 0.0, torch.minimum(low, high)), high, centre)


def _balanced_centre(r: Tensor, a: Tensor, b: Tensor, steps: int) -> Bracket:
    """The least a‖R − 1xᵀ‖₁ + b‖R − 1xᵀ‖_∞, a and b ≥ 0 of shape (…), bracketed.

    Both norms are maxima, over columns and over rows; with weights u of the columns and p of the rows, each with sum
    1, Σ_ij (a·u_j + b·p_i)|r_ij − x_j| is a lower bound, least at the weighted medians. The weights move to where
    the sums are largest (multiplicative weights).
    """
    n, d = r.shape[-2:]
    values, order = r.sort(dim=-2)  # of each column (…, n, d)
    log_u, log_p = torch.zeros_like(r[..., 0, :]), torch.zeros_like(r[..., 0])
    centre = total = torch.zeros_like(r[..., 0, :])  # the mean
    high = _balance(r, centre, a, b)
    low = torch.zeros_like(high)
    for step in range(1, steps + 1):
        u, p = torch.softmax(log_u, dim=-1), torch.softmax(log_p, dim=-1)
        weights = (a.unsqueeze(-1) * u).unsqueeze(-2) + (b.unsqueeze(-1) * p).unsqueeze(-1)  # (…, n, d)
        median = _weighted_median(values, order, weights)
        distances = (r - median.unsqueeze(-2)).abs()
        low = torch.maximum(low, (weights * distances).sum(dim=(-2, -1)))
        total = total + median
        for candidate in (median, total / step):
            value = _balance(r, candidate, a, b)
            better = value < high
            high = torch.where(better, value, high)
            centre = torch.where(better.unsqueeze(-1), candidate, centre)
        columns, rows = distances.sum(dim=-2), distances.sum(dim=-1)
        log_u = log_u + _push(columns, d, step)
        log_p = log_p + _push(rows, n, step)
    return Bracket(torch.minimum(low, high), high, centre)


def _push(sums: Tensor, count: int, step: int) -> Tensor:
    """How much the logarithms of the weights move in one step."""
    return math.sqrt(RATE * math.log(max(count, 2)) / step) * sums / sums.amax(dim=-1, keepdim=True).clamp(min=1e-300)


def _balance(r: Tensor, centre: Tensor, a: Tensor, b: Tensor) -> Tensor:
    distances = (r - centre.unsqueeze(-2)).abs()
    return a * distances.sum(dim=-2).amax(dim=-1) + b * distances.sum(dim=-1).amax(dim=-1)


def _diameter(r: Tensor) -> Tensor:
    """The largest ℓ₁ distance of two tokens, one token against all at a time: memory stays that of the tokens."""
    distances = [(r - row.unsqueeze(-2)).abs().sum(dim=-1).amax(dim=-1) for row in r.unbind(dim=-2)]
    return torch.stack(distances).amax(dim=0)


def _weighted_median(values: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Of each column, the first sorted value up to which at least half of the column's weight lies: (…, d)."""
    reached = weights.gather(-2, order).cumsum(dim=-2)
    index = (2 * reached >= reached[..., -1:, :]).int().argmax(dim=-2, keepdim=True)
    return values.gather(-2, index).squeeze(-2)
