"""Ranks and Dong et al.'s residual against their definitions."""

import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

import oracles
from depthscope.measures import (
    composite_residual,
    effective_rank,
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


@given(token_matrices(max_closeness=3))
def test_composite_residual_equals_the_definition(x: Tensor):
    expected = oracles.composite_norm(x - x.mean(dim=0)) / oracles.composite_norm(x)
    assert_close(composite_residual(x), expected, rtol=1e-9, atol=0)
