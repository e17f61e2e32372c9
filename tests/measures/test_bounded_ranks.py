"""Ranks with bounds: against the SVD, at every degree of collapse; and the mean of some sequences."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from depthscope import measures as m
from depthscope.measures import krylov, rank
from samples import seeded


def tokens(spread: float, n: int = 76, d: int = 70, batch: int = 3) -> Tensor:
    generator = seeded(0)
    shape = torch.linspace(0.05, 1, d)
    return torch.randn(batch, 1, d, generator=generator) + spread * shape * torch.randn(
        batch, n, d, generator=generator
    )


def by_svd(x: Tensor) -> Tensor:
    sigma = torch.linalg.svdvals(x.double())
    return sigma.square().sum(dim=-1) / sigma[..., 0].square()


@pytest.mark.parametrize("spread", [0, 1e-6, 1e-3, 0.1, 1, 30])
@pytest.mark.parametrize("scale", [1, 1e-30, 1e25])
def test_stable_rank_to_1e_5_and_inside_its_bound(spread: float, scale: float):
    x = tokens(spread)
    found, expected = m.bounded_stable_rank((scale * x.double()).float()), by_svd(x)
    assert_close(found.value, expected, rtol=1e-5, atol=0)
    assert ((found.value - expected).abs() <= found.error + 2e-6 * expected).all()
    assert (found.error <= 1e-5 * found.value).all()


def test_stable_rank_by_the_gram_matrix_where_the_space_does_not_know_it(monkeypatch: pytest.MonkeyPatch):
    """Equal singular values but for 1e-2: too close for a few products."""
    q = torch.linalg.qr(torch.randn(2, 170, 150, generator=seeded(1), dtype=torch.float64)).Q
    x = q * (1 + 1e-2 * torch.linspace(0, 1, 150, dtype=torch.float64))
    found = m.bounded_stable_rank(x)
    assert_close(found.value, by_svd(x), rtol=1e-9, atol=0)
    assert (found.error == 0).all()
    monkeypatch.setattr(rank, "TOLERANCE", torch.inf)  # without it: the bound is larger, and holds
    alone = m.bounded_stable_rank(x)
    assert ((alone.value - by_svd(x)).abs() <= alone.error).all()


def test_masked_nan_and_zero_tokens():
    x = tokens(1.0)
    mask = torch.ones(3, 76, dtype=torch.bool)
    mask[1, 65:] = False
    padded = x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    assert_close(m.bounded_stable_rank(padded, mask).value[1], by_svd(x[1, :65]), rtol=1e-5, atol=0)
    broken = x.clone()
    broken[0], broken[1, 2, 3] = 0, torch.nan
    assert m.bounded_stable_rank(broken).value.isnan().tolist() == [True, True, False]
    assert m.bounded_effective_rank(broken).value.isnan().tolist() == [True, True, False]


def check(found: m.Bounded, expected: Tensor) -> None:
    assert ((found.value - expected).abs() <= found.error + 1e-12).all()


@pytest.mark.parametrize("spread", [0, 1e-8, 1e-6, 1e-5, 1e-3, 0.1, 1])
def test_the_bound_of_the_effective_rank_holds(spread: float):
    x = tokens(spread).double()
    check(m.bounded_effective_rank(x), m.effective_rank(x, exact=True))
    if spread == 1e-6:
        found = m.bounded_effective_rank(x)
        with pytest.raises(AssertionError):
            check(m.Bounded(found.value, found.error / 1e3), m.effective_rank(x, exact=True))


def test_a_float32_gram_matrix_would_not_do():
    """Near collapse it is off by more than the bound says of float64."""
    x = tokens(1e-3)
    squares = torch.linalg.eigvalsh(x.mT @ x).clamp(min=0)
    p = squares.sqrt() / squares.sqrt().sum(dim=-1, keepdim=True)
    with pytest.raises(AssertionError):
        check(m.bounded_effective_rank(x), torch.special.entr(p).sum(dim=-1).exp().double())


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


def test_the_start_is_the_same_at_every_call_and_leaves_the_global_state():
    before = torch.get_rng_state()
    real = torch.ones(50, dtype=torch.bool)
    first, second = (krylov.random_rows(2, 3, real, torch.float64) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(first @ first.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), rtol=0, atol=1e-12)
