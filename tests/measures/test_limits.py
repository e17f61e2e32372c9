"""Accuracy in the collapsed limit, against exact rational arithmetic on the stored entries."""

import pytest
import torch

import oracles
from depthscope.measures import (
    cosine_similarity,
    direction_similarity,
    escalation_rate,
    growth,
    token_diversity,
    token_similarity,
)
from samples import seeded

# The accuracy that the measures promise for each stored format.
PROMISED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-5}


def collapsed(dtype: torch.dtype, distance: float, n: int = 17, d: int = 5, seed: int = 0) -> torch.Tensor:
    generator = seeded(seed)
    common = torch.randn(1, d, generator=generator, dtype=torch.float64)
    return (common + distance * torch.randn(n, d, generator=generator, dtype=torch.float64)).to(dtype)


def relative_error(diversity: torch.Tensor, x: torch.Tensor) -> float:
    exact = oracles.exact_diversity(x)
    return abs(float(diversity) - float(exact)) / float(exact)


@pytest.mark.parametrize("dtype", PROMISED)
def test_diversity_at_any_degree_of_collapse(dtype: torch.dtype):
    """From independent tokens down to tokens that differ in their last bits."""
    distance = 1.0
    while distance >= torch.finfo(dtype).eps:
        for seed in range(3):
            x = collapsed(dtype, distance, seed=seed)
            assert relative_error(token_diversity(x), x) < PROMISED[dtype]
        distance /= 4


@pytest.mark.parametrize("dtype", PROMISED)
def test_diversity_of_a_single_last_bit(dtype: torch.dtype):
    x = torch.full((100, 3), 1.7, dtype=dtype)
    x[41, 1] = torch.nextafter(x[41, 1], torch.tensor(2.0, dtype=dtype))
    assert relative_error(token_diversity(x), x) < PROMISED[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("where", [0, 40])
def test_diversity_with_one_huge_token(dtype: torch.dtype, where: int):
    """Also when it is the first token, by which all others are shifted."""
    x = collapsed(dtype, 1e-3, n=300)
    x[where] *= 1e3
    assert relative_error(token_diversity(x), x) < PROMISED[dtype]


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e-30), (torch.float32, 1e30), (torch.float64, 1e-200), (torch.float64, 1e200)]
)
def test_squares_do_not_underflow_or_overflow(dtype: torch.dtype, scale: float):
    x = collapsed(dtype, 1e-2) * scale
    y = collapsed(dtype, 1e-4, seed=1) * scale
    assert relative_error(token_diversity(x), x) < PROMISED[dtype]
    assert 0 < token_similarity(x) <= 1
    assert 0.9 < cosine_similarity(x) <= 1
    assert 0.9 < direction_similarity(x).similarity <= 1
    assert growth(x, y).diversity.isfinite()
    assert escalation_rate(x, y).isfinite()


def test_tiny_differences_in_one_feature():
    """Differences far below the other entries: their squares underflow in float32."""
    x = torch.ones(8, 2)
    x[:, 1] = torch.arange(8) * 1e-30
    assert relative_error(token_diversity(x), x) < PROMISED[torch.float32]


@pytest.mark.parametrize("dtype", [*PROMISED, torch.float16])
@pytest.mark.parametrize("n", [2, 3, 7, 1000])
def test_identical_tokens_are_exact(dtype: torch.dtype, n: int):
    x = torch.randn(2, 1, 33, generator=seeded(n)).to(dtype).expand(2, n, 33)
    assert (token_diversity(x) == 0).all()
    assert (token_similarity(x) == 1).all()
    assert (cosine_similarity(x) == 1).all()


def test_the_complement_would_fail():
    """The mutant 1 − t_sim keeps no digit where the promised form keeps twelve."""
    x = collapsed(torch.float64, 1e-9)
    assert relative_error(token_diversity(x), x) < 1e-12
    assert relative_error(1 - token_similarity(x), x) > 1e-2


def test_the_unshifted_mean_would_fail():
    """The mutant that centres without shifting first: the mean of equal tokens is not the token."""
    x = torch.randn(1, 8, generator=seeded(0), dtype=torch.float64).expand(1000, 8)
    assert (x - x.mean(dim=0)).square().sum() > 0
    assert token_diversity(x) == 0


def test_similarity_is_right_when_the_mean_vanishes():
    """The other limit: pairs of opposite tokens, of which one is off by a little."""
    half = torch.randn(32, 8, generator=seeded(0), dtype=torch.float64)
    x = torch.cat([half, -half])
    x[0] += 1e-6
    assert abs(token_similarity(x) / (8 * 1e-12 / 64 / x.square().sum()) - 1) < 1e-6
