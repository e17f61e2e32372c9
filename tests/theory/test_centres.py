"""The centres of the three norms: exact or bracketed, against linear programming, and what the mean costs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import linprog
from torch import Tensor
from torch.testing import assert_close

from depthscope.measures import composite_norm, composite_residual
from depthscope.theory import column_centre, composite_centre, mean_factor, row_centre
from samples import seeded, token_matrices

F64 = torch.float64
NORMS = {
    column_centre: lambda r: torch.linalg.matrix_norm(r, 1),
    row_centre: lambda r: torch.linalg.matrix_norm(r, torch.inf),
    composite_centre: composite_norm,
}


def least_row_norm(x: Tensor) -> float:
    """min over y, s, t of t: |x_ij − y_j| ≤ s_ij, Σ_j s_ij ≤ t, as a linear programme."""
    n, d = x.shape
    variables = d + n * d + 1
    rows, limits = [], []
    for i in range(n):
        total = np.zeros(variables)
        total[d + i * d : d + (i + 1) * d], total[-1] = 1, -1
        rows.append(total)
        limits.append(0.0)
        for j in range(d):
            for sign in (1, -1):
                row = np.zeros(variables)
                row[j], row[d + i * d + j] = -sign, -1
                rows.append(row)
                limits.append(-sign * x[i, j].item())
    cost = np.zeros(variables)
    cost[-1] = 1
    found = linprog(cost, A_ub=np.array(rows), b_ub=np.array(limits), bounds=[(None, None)] * variables)
    assert found.status == 0
    return found.fun


@pytest.mark.parametrize("seed", range(6))
def test_the_row_centre_brackets_the_linear_programme(seed: int):
    x = torch.randn(3 + seed, 4, generator=seeded(seed), dtype=F64) ** 3 + 5
    found = row_centre(x)
    best = least_row_norm(x)
    assert found.low.item() <= best * (1 + 1e-9)
    assert found.high.item() >= best * (1 - 1e-9)
    assert found.high < 1.06 * found.low  # 400 steps leave a few per cent
    assert_close(NORMS[row_centre](x - found.centre), found.high)
    assert NORMS[row_centre](x - x.median(dim=0).values).item() > best * (1 + 1e-3)  # the medians are not it


def test_no_random_centre_is_better_than_a_lower_bound():
    generator = seeded(0)
    for n, d in ((2, 3), (5, 2), (9, 6)):
        x = torch.randn(n, d, generator=generator, dtype=F64) ** 3
        for centre, norm in NORMS.items():
            found = centre(x)
            weights = torch.softmax(4 * torch.randn(3000, n, generator=generator, dtype=F64), dim=-1)
            inside, near = weights @ x, found.centre + 0.1 * torch.randn(3000, d, generator=generator, dtype=F64)
            tried = norm(x - torch.cat([inside, near]).unsqueeze(-2))
            assert tried.min() >= found.low * (1 - 1e-12)
            assert_close(norm(x - found.centre), found.high)


def test_the_composite_bracket_is_narrow_and_beats_mean_and_median():
    x = torch.randn(20, 8, 5, generator=seeded(1), dtype=F64) ** 3
    found = composite_centre(x)
    assert (found.high / found.low).max() < 1.06
    mean, median = (composite_norm(x - at) for at in (x.mean(-2, keepdim=True), x.median(-2, keepdim=True).values))
    assert (found.high <= mean).all()
    assert (mean > 1.05 * found.high).any()
    assert (median > 1.05 * found.high).any()


def mean_is_within(x: Tensor, factor: float) -> bool:
    """In all three norms, against the best centre found: the least is not larger than its norm."""
    residual = x - x.mean(dim=-2, keepdim=True)
    return all(
        norm(residual) <= factor * centre(x, **options).high * (1 + 1e-9) + 1e-12
        for (centre, norm), options in zip(NORMS.items(), ({}, {"steps": 50}, {"steps": 50}), strict=True)
    )


@settings(max_examples=25)
@given(token_matrices(max_closeness=0))
def test_the_mean_costs_at_most_its_factor(x: Tensor):
    assert mean_is_within(x, mean_factor(len(x)))


def test_the_mean_s_factor_is_reached_and_no_smaller_one_holds():
    """One token of n apart: the medians leave 1, the mean leaves 2(1 − 1/n)."""
    for n in (2, 3, 10):
        x = torch.zeros(n, 1, dtype=F64)
        x[0] = 1.0
        assert NORMS[column_centre](x - x.mean(dim=0)).item() == pytest.approx(
            mean_factor(n) * column_centre(x).low.item()
        )
        assert mean_is_within(x, mean_factor(n))
        if n > 2:
            assert not mean_is_within(x, 0.95 * mean_factor(n))  # the mutant


def test_the_measure_s_median_is_the_column_centre():
    x = torch.randn(7, 5, generator=seeded(2), dtype=F64)
    by_hand = composite_norm(x - column_centre(x).centre) / composite_norm(x)
    assert_close(composite_residual(x, centre="median"), by_hand)


@pytest.mark.parametrize("centre", NORMS)
def test_degenerate_tokens(centre):
    for x in (torch.ones(1, 3), torch.full((4, 3), 7.0), torch.zeros(2, 2)):
        found = centre(x.double())
        assert found.low == found.high == 0
        assert_close(found.centre, x[0].double())
    tiny = 1e-280 * torch.randn(5, 3, generator=seeded(0), dtype=F64)
    found = centre(tiny)
    assert 0 < found.low <= found.high
    batch = torch.randn(2, 3, 5, 4, generator=seeded(0), dtype=F64)
    assert_close(centre(batch).high[1, 2], centre(batch[1, 2]).high)
