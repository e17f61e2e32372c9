"""Rank, leading direction and Dong et al.'s residual against their definitions."""

import torch
from hypothesis import assume, given
from torch import Tensor
from torch.testing import assert_close

import oracles
from depthscope import measures as m
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
    expected = oracles.composite_norm(x - x.mean(dim=0)) / oracles.composite_norm(x)
    assert_close(composite_residual(x), expected, rtol=1e-9, atol=0)


def tokens(spread: float, n: int = 76, d: int = 70, batch: int = 3) -> Tensor:
    generator = seeded(0)
    shape = torch.linspace(0.05, 1, d)
    return torch.randn(batch, 1, d, generator=generator) + spread * shape * torch.randn(
        batch, n, d, generator=generator
    )


def test_the_sampled_rank():
    x = torch.cat([tokens(spread, batch=4) for spread in (0.1, 1)])
    ranks = m.effective_rank(x)
    found = m.sampled_rank(m.TokenMatrix(x))
    assert_close(found.mean, ranks[[0, 4]].mean())
    assert_close(found.error, ranks[[0, 4]].std() / 2**0.5 * 0.75**0.5)
    whole = m.sampled_rank(m.TokenMatrix(x), share=1)
    assert_close(whole.mean, ranks.mean())
    assert whole.error == 0
    one = m.sampled_rank(m.TokenMatrix(x[:1]))
    assert (one.mean, one.error) == (ranks[0], 0)
    broken = x.clone()
    broken[4] = 0
    assert m.sampled_rank(m.TokenMatrix(broken)).error.isnan()


def test_the_standard_error_is_that_of_the_draw():
    """Over many batches of the same population the mean is off by its standard error, on average."""
    ranks = 10 + torch.randn(4000, 8, generator=seeded(2), dtype=torch.float64)
    off = ranks[:, [0, 4]].mean(dim=-1) - ranks.mean(dim=-1)
    said = ranks[:, [0, 4]].var(dim=-1) / 2 * 0.75
    assert_close(off.square().mean(), said.mean(), rtol=0.1, atol=0)
