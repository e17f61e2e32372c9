"""Rank, leading direction and Dong et al.'s residual against their definitions."""

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor
from torch.testing import assert_close

import oracles
from depthscope.measures import (
    composite_residual,
    effective_rank,
    leading_direction,
    singular_values,
    stable_rank,
)
from samples import seeded, token_matrices


@given(token_matrices(min_tokens=1, max_closeness=4))
def test_effective_rank_equals_the_svd_form(x: Tensor):
    # Lost singular values cost at most k√(kε)ln(1/√(kε)), k ≤ 9 here: 7e-6.
    assert_close(effective_rank(x), oracles.entropy_rank(x), rtol=7e-6, atol=0)
    assert_close(effective_rank(x, exact=True), oracles.entropy_rank(x), rtol=1e-12, atol=0)


@given(token_matrices(min_tokens=1))
def test_stable_rank_equals_the_svd_form(x: Tensor):
    sigma = torch.linalg.svdvals(x)
    assert_close(stable_rank(x), sigma.square().sum() / sigma[0].square(), rtol=1e-12, atol=0)


def test_known_ranks():
    assert_close(effective_rank(torch.eye(5, 9)), torch.tensor(5.0, dtype=torch.float64))
    assert_close(stable_rank(torch.eye(9, 5)), torch.tensor(5.0, dtype=torch.float64))
    assert effective_rank(torch.ones(768, 768)) == 1
    assert_close(stable_rank(torch.ones(768, 768)), torch.tensor(1.0, dtype=torch.float64))


def test_gram_and_svd_agree_on_a_wide_spectrum_and_differ_only_where_documented():
    u, _ = torch.linalg.qr(torch.randn(40, 40, generator=seeded(0), dtype=torch.float64))
    sigma = 10.0 ** -torch.arange(40, dtype=torch.float64).div(3)  # down to 1e-13
    x = u * sigma
    gram, svd = singular_values(x), singular_values(x, exact=True)
    kept = svd > 1e-6 * svd[0]
    assert_close(gram[kept], svd[kept], rtol=1e-3, atol=0)
    assert (gram[svd < 1e-8 * svd[0]] == 0).all()


@given(token_matrices(min_tokens=3, max_closeness=2))
def test_leading_direction_equals_the_svd_form(x: Tensor):
    sigma = torch.linalg.svdvals(x)
    assert_close(leading_direction(x).energy_share, sigma[0].square() / sigma.square().sum(), rtol=1e-10, atol=0)


@given(token_matrices(min_tokens=3, max_closeness=2))
def test_where_one_direction_leads_its_tokens_are_those_of_the_svd(x: Tensor):
    u, sigma, _ = torch.linalg.svd(x, full_matrices=False)
    assume(len(sigma) == 1 or sigma[1] < 0.9 * sigma[0])
    _, evenness, largest = leading_direction(x)
    assert_close(evenness, u[:, 0].sum().square() / len(x), rtol=1e-8, atol=1e-10)
    assert_close(largest, u[:, 0].square().amax(), rtol=1e-8, atol=1e-10)


def test_leading_direction_tells_a_collapse_from_a_sink_and_from_clusters():
    v = torch.randn(16, generator=seeded(0))
    noise = 0.01 * torch.randn(64, 16, generator=seeded(1))
    collapse, clusters = noise + v, noise + v * torch.tensor([1.0, -1.0]).repeat(32)[:, None]
    sink = noise.clone()
    sink[0] = 100 * v
    assert leading_direction(collapse).evenness > 0.99
    assert leading_direction(sink).largest_token > 0.99
    assert leading_direction(clusters).energy_share > 0.99
    assert leading_direction(clusters).evenness < 0.01
    assert leading_direction(clusters).largest_token < 0.05


@given(token_matrices(max_closeness=3))
def test_composite_residual_equals_the_definition(x: Tensor):
    for centre, by_hand in (("mean", x.mean(dim=0)), ("median", x.median(dim=0).values)):
        expected = oracles.composite_norm(x - by_hand) / oracles.composite_norm(x)
        assert_close(composite_residual(x, centre=centre), expected, rtol=1e-9, atol=0)


def check_best_centre(centre, x: Tensor) -> None:
    """No other centre gives a smaller ‖X − 1cᵀ‖₁."""
    best = torch.linalg.matrix_norm(x - centre(x), 1)
    for seed in range(40):
        other = x.mean(dim=0) + 0.3 * torch.randn(x.shape[1], generator=seeded(seed), dtype=x.dtype)
        assert torch.linalg.matrix_norm(x - other, 1) >= best - 1e-12
    assert torch.linalg.matrix_norm(x - x.mean(dim=0), 1) >= best - 1e-12


def test_medians_are_the_best_centre_and_the_mean_is_not():
    x = torch.randn(9, 3, generator=seeded(3), dtype=torch.float64).exp()
    check_best_centre(lambda x: x.median(dim=0).values, x)
    with pytest.raises(AssertionError):
        check_best_centre(lambda x: x.mean(dim=0), x)
