"""Identities and invariances of the similarity measures, each with a mutant that must fail."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

import oracles
from depthscope.measures import (
    TokenMatrix,
    TokenNorms,
    against_trunk,
    angular_distance,
    composite_norm,
    cosine_similarity,
    direction_similarity,
    escalation_rate,
    frequency_ratio,
    growth,
    mu,
    omega,
    token_diversity,
    token_similarity,
    token_sum,
)
from samples import attention_and_tokens, seeded, token_matrices

# --- the naive forms ------------------------------------------------------------------------------


@given(token_matrices(max_closeness=3))
def test_similarity_and_diversity_equal_the_projections(x: Tensor):
    # The naive projection loses as many digits as the tokens are close: 1e-3 apart leaves 1e-10.
    assert_close(token_similarity(x), oracles.similarity(x), rtol=1e-12, atol=0)
    naive = oracles.energy(oracles.projections(x)[1]) / oracles.energy(x)
    assert_close(token_diversity(x), naive, rtol=1e-9, atol=0)


@given(token_matrices(max_closeness=3))
def test_cosine_similarity_equals_the_mean_over_pairs(x: Tensor):
    assert_close(cosine_similarity(x).item(), oracles.pairwise_cosine(x), rtol=0, atol=1e-12)


# --- Prop. 2.3 and the frequency ratio ------------------------------------------------------------


def check_rate_identity(rate, x: Tensor, y: Tensor) -> None:
    """r = 1 + (ξ₁/ξ₂ − 1) t_sim(X), Yu & Zhang 2024, Prop. 2.3."""
    xi1, xi2 = growth(x, y)
    assert_close(rate(x, y), 1 + (xi1 / xi2 - 1) * token_similarity(x), rtol=1e-12, atol=0)


@given(attention_and_tokens(), st.integers(0, 2**16))
def test_rate_identity(sample: tuple[Tensor, Tensor], seed: int):
    p, x = sample
    w = torch.randn(x.shape[1], x.shape[1], generator=seeded(seed), dtype=torch.float64)
    check_rate_identity(escalation_rate, x, x + p @ x @ w)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda x, y: escalation_rate(y, x),
        lambda x, y: token_similarity(y) / token_similarity(x),
        lambda x, y: escalation_rate(x, y).sqrt(),
    ],
    ids=["inverted", "similarities", "norms"],
)
def test_rate_identity_fails_for_mutants(mutant):
    x, y = torch.randn(2, 6, 4, generator=seeded(0), dtype=torch.float64)
    with pytest.raises(AssertionError):
        check_rate_identity(mutant, x, y)


def check_frequency_identity(ratio, x: Tensor) -> None:
    assert_close(token_similarity(x), 1 / (1 + ratio(x) ** 2), rtol=1e-12, atol=0)


@given(token_matrices())
def test_similarity_is_a_function_of_the_frequency_ratio(x: Tensor):
    check_frequency_identity(frequency_ratio, x)


@pytest.mark.parametrize("mutant", [lambda x: frequency_ratio(x) ** 2, lambda x: 1 / frequency_ratio(x)])
def test_frequency_identity_fails_for_mutants(mutant):
    with pytest.raises(AssertionError):
        check_frequency_identity(mutant, torch.randn(6, 4, generator=seeded(0), dtype=torch.float64))


# --- invariances ----------------------------------------------------------------------------------


def permuted(x: Tensor) -> Tensor:
    return x[torch.randperm(len(x), generator=seeded(1))]


def rotated(x: Tensor) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(x.shape[1], x.shape[1], generator=seeded(2), dtype=x.dtype))
    return x @ q


def scaled(x: Tensor) -> Tensor:
    return -1e12 * x


def check_invariance(measure, change, x: Tensor) -> None:
    # A rotation rounds the entries themselves: relative to deviations of 1e-6, that is 1e-10.
    assert_close(measure(change(x)), measure(x), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("change", [permuted, rotated, scaled])
@pytest.mark.parametrize(
    "measure",
    [
        token_similarity,
        token_diversity,
        cosine_similarity,
        frequency_ratio,
        lambda x: direction_similarity(x).similarity,
    ],
    ids=["t_sim", "t_div", "t_cos", "ratio", "directions"],
)
@given(x=token_matrices())
def test_invariance(measure, change, x: Tensor):
    check_invariance(measure, change, x)


@pytest.mark.parametrize(
    ("change", "mutant"),
    [
        (permuted, lambda x: token_similarity(x[: len(x) // 2])),
        (permuted, lambda x: token_diversity(x - x[0]) + x[0, 0]),
        (rotated, lambda x: token_similarity(x[:, :1])),
        (scaled, lambda x: token_similarity(x + 1)),
    ],
)
def test_invariance_fails_for_mutants(change, mutant):
    with pytest.raises(AssertionError):
        check_invariance(mutant, change, torch.randn(6, 4, generator=seeded(0), dtype=torch.float64))


# --- one huge token -------------------------------------------------------------------------------


def test_one_huge_token_hides_a_collapse_from_similarity_but_not_from_directions():
    x = torch.ones(128, 16)
    x[5] = 100 * torch.randn(16, generator=seeded(0))
    assert token_similarity(x) < 0.1
    similarity, outliers = direction_similarity(x)
    assert similarity == 1
    assert outliers.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize(("size", "is_outlier"), [(9.9, False), (10.1, True)])
@pytest.mark.parametrize("masked", [False, True])
def test_an_outlier_has_more_than_ten_times_the_median_norm(size: float, is_outlier: bool, masked: bool):
    x = torch.nn.functional.normalize(torch.randn(21, 4, generator=seeded(0), dtype=torch.float64), dim=-1)
    x[5] *= size
    mask = torch.ones(21) if masked else None
    assert TokenMatrix(x, mask).has_outliers == is_outlier
    assert direction_similarity(x, mask).outliers.nonzero().flatten().tolist() == ([5] if is_outlier else [])


def test_directions_have_no_mean_where_it_is_the_rounding_of_their_tokens():
    """Opposite pairs, but for the last bit of one entry in bfloat16: a mean of 1e-5, which float32 would trust."""
    half = torch.randn(64, 8, generator=seeded(0)).bfloat16()
    x = torch.cat([half, -half])
    x[3, 2] = x[3, 2] * (1 + torch.finfo(torch.bfloat16).eps)
    assert frequency_ratio(TokenMatrix(x).directions).isnan()
    assert frequency_ratio(TokenMatrix(x.float()).directions).isfinite()


FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def centred_draws(dtype: torch.dtype, draws: int = 40) -> Iterator[Tensor]:
    """Tokens whose mean, as large as their deviations, was subtracted in their own format; some begin with a sink."""
    generator = seeded(0)
    for n, d in ((2, 4), (3, 4), (8, 64), (64, 4), (512, 4), (512, 64)):
        x = torch.randn(draws, n, d, generator=generator, dtype=torch.float64)
        x[: draws // 4, 0] *= 100
        deviations = x - x.mean(dim=1, keepdim=True)
        mean = torch.randn(draws, 1, d, generator=generator, dtype=torch.float64)
        mean *= deviations.norm(dim=(1, 2), keepdim=True) / (n**0.5 * mean.norm(dim=-1, keepdim=True))
        tokens = (deviations + mean).to(dtype)
        yield tokens - tokens.mean(dim=1, keepdim=True)


@pytest.mark.parametrize("dtype", FORMATS)
def test_there_is_no_ratio_to_a_mean_that_was_subtracted(dtype: torch.dtype):
    for tokens in centred_draws(dtype):
        assert frequency_ratio(tokens).isnan().all()
        assert frequency_ratio(tokens, torch.ones(tokens.shape[:2])).isnan().all()


EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_ratios_of_eight_bits_are_those_of_the_numbers_that_they_hold(dtype: torch.dtype):
    """Deviations 4 to 11 times as large as the mean are no noise, though two bits of precision could not tell."""
    x = torch.randn(8, 12, 16, generator=seeded(0), dtype=torch.float64)
    x = x - x.mean(dim=1, keepdim=True)
    x = x + torch.linspace(1 / 11, 1 / 4, 8, dtype=torch.float64)[:, None, None]
    stored = x.to(dtype)
    wide, p = stored.float(), torch.softmax(torch.randn(8, 12, 12, generator=seeded(1)), dim=-1)
    assert 3.5 < frequency_ratio(wide).min() < frequency_ratio(wide).max() < 13
    assert_close(frequency_ratio(stored), frequency_ratio(wide))
    assert_close(growth(stored, stored).mean, torch.ones(8, dtype=torch.float64))
    assert_close(omega(p, stored), omega(p, wide))
    assert_close(mu(p, stored).mean, mu(p, wide).mean)
    assert_close(composite_norm(stored), composite_norm(wide))
    assert_close(against_trunk(stored, stored).ratio, torch.ones(8, 12, dtype=torch.float64))
    assert_close(token_sum(stored).total, token_sum(wide).total)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_mean_that_only_eight_bits_have_made_is_noise(dtype: torch.dtype):
    for x in centred_draws(torch.float32):
        without_sinks = x[len(x) // 4 :]
        assert frequency_ratio(without_sinks.to(dtype)).isnan().all()


def test_one_epsilon_alone_would_not_do(monkeypatch: pytest.MonkeyPatch):
    """What was asked before sums were thought of, and before a lost mean was summed again."""
    monkeypatch.setattr(TokenNorms, "has_mean", property(lambda x: x.mean_norm > x.epsilon * x.norm))
    assert any(frequency_ratio(tokens).isfinite().any() for tokens in centred_draws(torch.float32))
    monkeypatch.undo()
    monkeypatch.setattr("depthscope.measures.tokens.mean_is_lost", lambda mean, *_: torch.zeros_like(mean).bool())
    assert any(frequency_ratio(tokens).isfinite().any() for tokens in centred_draws(torch.float32))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("sink", [1, 100])
def test_a_mean_above_the_noise_has_its_ratio(dtype: torch.dtype, sink: float):
    """Thirty epsilons, to the precision that the format leaves it: of the stored tokens, it is that of long double."""
    x = torch.randn(64, 16, generator=seeded(0), dtype=torch.float64)
    x[0] *= sink
    x = x - x.mean(dim=0)
    share = 30 * max(torch.finfo(dtype).eps, 2**-40)
    tokens = (x + share * x.norm() / 32).to(dtype)  # √n·√d = 32
    stored = tokens.double().numpy().astype(np.longdouble)
    mean = stored.mean(axis=0)
    expected = float(np.linalg.norm(stored - mean) / (8 * np.linalg.norm(mean)))
    assert 0.5 / share < expected < 2 / share
    assert frequency_ratio(tokens).item() == pytest.approx(expected, rel=1e-4)


def test_ordinary_tokens_are_no_outliers():
    x = torch.randn(3, 64, 32, generator=seeded(0))
    similarity, outliers = direction_similarity(x)
    assert not outliers.any()
    assert_close(similarity, token_similarity(x / x.norm(dim=-1, keepdim=True)), rtol=1e-6, atol=0)


# --- sharing --------------------------------------------------------------------------------------


def test_a_token_matrix_gives_the_same_as_a_tensor_and_keeps_its_own_mask():
    x = torch.randn(3, 7, 5, generator=seeded(0))
    mask = torch.arange(7) < torch.tensor([[7], [4], [2]])
    prepared = TokenMatrix(x, mask)
    for measure in (token_similarity, token_diversity, cosine_similarity, frequency_ratio):
        assert torch.equal(measure(prepared), measure(x, mask))
    with pytest.raises(ValueError, match="already carries a mask"):
        token_similarity(prepared, mask)


# --- turning --------------------------------------------------------------------------------------


def test_angular_distance_equals_the_mean_angle_and_is_right_for_small_angles():
    x, y = torch.randn(2, 5, 8, generator=seeded(0), dtype=torch.float64)
    angles = [torch.arccos(a @ b / (a.norm() * b.norm())) for a, b in zip(x, y, strict=True)]
    assert_close(angular_distance(x, y), torch.stack(angles).mean() / torch.pi, rtol=1e-12, atol=0)
    tiny = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([[1.0, 1e-9]], dtype=torch.float64)
    assert_close(angular_distance(*tiny).item(), 1e-9 / torch.pi, rtol=1e-9, atol=0)
    assert torch.arccos(cosine_similarity(torch.cat(tiny))) == 0  # the mutant sees nothing
    assert angular_distance(x, x) == 0
    assert_close(angular_distance(x, -3 * x).item(), 1.0)


def test_angular_distance_leaves_out_padding_and_zero_tokens():
    x, y = torch.randn(2, 5, 8, generator=seeded(0), dtype=torch.float64)
    expected = angular_distance(x[:4], y[:4])
    assert_close(angular_distance(x, y, torch.tensor([1, 1, 1, 1, 0])), expected)
    y[4] = 0
    assert_close(angular_distance(x, y), expected)
    assert angular_distance(x[4:], y[4:]).isnan()
    with pytest.raises(ValueError, match="one shape"):
        angular_distance(x, y[:, :4])


def test_a_step_can_be_measured_from_norms_alone():
    x, y = torch.randn(2, 3, 6, 4, generator=seeded(0))
    kept = TokenMatrix(x).norms, TokenMatrix(y).norms
    assert torch.equal(escalation_rate(*kept), escalation_rate(x, y))
    assert all(torch.equal(a, b) for a, b in zip(growth(*kept), growth(x, y), strict=True))


# --- as a loss ------------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "measure", [token_similarity, token_diversity, cosine_similarity, frequency_ratio], ids=lambda f: f.__name__
)
def test_the_similarities_are_differentiable(measure, masked: bool):
    x = torch.randn(2, 5, 4, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]) if masked else None
    assert torch.autograd.gradcheck(lambda z: measure(z, mask), (x,))
