"""Yu & Zhang's statements as properties, each with a mutant that must fail; Monte-Carlo within its own error."""

import math

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor
from torch.testing import assert_close

from depthscope.measures import (
    Growth,
    delta,
    escalation_rate,
    growth,
    mu,
    omega,
    second_eigenvalue,
    token_diversity,
    token_similarity,
)
from depthscope.theory import (
    asymptotic_rate,
    eta,
    expected_eta,
    expected_growth,
    expected_pre_norm_energy,
    expected_rate,
    gamma,
    lower_bound,
    spectral_estimate,
)
from samples import attention_and_tokens, seeded


def expected_ratio(p, x, **options):
    """E[ξ₁]/E[ξ₂]."""
    expected = expected_growth(p, x, **options)
    return expected.mean / expected.diversity


F64 = torch.float64


def draw(n: int, d: int, h: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    p = torch.softmax(torch.randn(h, n, n, generator=seeded(seed), dtype=F64), dim=-1)
    return p, torch.randn(n, d, generator=seeded(seed + 1), dtype=F64) + 0.5


def steps(p: Tensor, x: Tensor, weights: Tensor, alpha: float = 1.0) -> Tensor:
    """X + α[P₁XW₁ … P_hXW_h] for weights (draws, h, d, d/h) → (draws, n, d)."""
    mixed = p @ x  # (h, n, d)
    return x + alpha * (mixed @ weights).transpose(-3, -2).flatten(-2)


def gaussian(draws: int, d: int, h: int, gain: float = 1.0, seed: int = 7) -> Tensor:
    return math.sqrt(gain / d) * torch.randn(draws, h, d, d // h, generator=seeded(seed), dtype=F64)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    return values.mean().item(), (values.std() / math.sqrt(len(values))).item()


@pytest.mark.parametrize("h", [1, 3])
@pytest.mark.parametrize(("alpha", "gain"), [(1.0, 1.0), (0.5, 3.0)])
def test_expected_growth_agrees_with_monte_carlo(h: int, alpha: float, gain: float):
    p, x = draw(16, 12, h)
    y = steps(p, x, gaussian(20_000, 12, h, gain), alpha)
    found, expected = growth(x.expand_as(y), y), expected_growth(p, x, alpha=alpha, gain=gain)
    for part in ("mean", "diversity"):
        mean, error = mean_and_error(getattr(found, part))
        assert abs(mean - getattr(expected, part).item()) < 4 * error
    forgot_alpha = expected_growth(p, x, gain=2 * gain)  # the mutant
    mean, error = mean_and_error(found.mean)
    assert abs(mean - forgot_alpha.mean.item()) > 10 * error


@pytest.mark.parametrize("h", [1, 2])
def test_the_second_order_term_is_needed_and_enough(h: int):
    """At d = 4 the ratio of expectations is off by many standard errors; with E[η] it agrees better by far."""
    p, x = draw(24, 4, h, seed=4)
    y = steps(p, x, gaussian(400_000, 4, h))
    xi1, xi2 = growth(x.expand_as(y), y)
    mean, error = mean_and_error(xi1 / xi2)
    first = expected_ratio(p, x).item()
    second = first - expected_eta(p, x).item()
    assert abs(first - mean) > 5 * error
    assert abs(second - mean) < 0.35 * abs(first - mean)
    rate, rate_error = mean_and_error(escalation_rate(x.expand_as(y), y))
    assert (
        abs(expected_rate(p, x).item() - rate) < 0.35 * abs(first - mean) * token_similarity(x).item() + 4 * rate_error
    )


@given(attention_and_tokens())
def test_the_paper_s_algebra(sample: tuple[Tensor, Tensor]):
    """(13) is (9) put into (8): α²dσ²(μ₁² − μ₂²)/(1 + α²dσ²μ₂²) = E[ξ₁]/E[ξ₂] − 1; γ in both forms of (24)."""
    p, x = sample
    mu1, mu2 = (value.square() for value in mu(p, x))
    a = 0.7**2 * 1.3
    e1, e2 = expected_growth(p, x, alpha=0.7, gain=1.3)
    assert_close(e1 / e2 - 1, a * (mu1 - mu2) / (1 + a * mu2), rtol=1e-9, atol=1e-12)
    assert_close(gamma(Growth(e1, e2)), (1 + a * mu2) ** 2 / (3 + a * (mu1 + 2 * mu2)), rtol=1e-9, atol=0)


def test_gamma_is_at_least_a_quarter_for_doubly_stochastic_attention():
    ring = 0.5 * (torch.eye(6, dtype=F64) + torch.roll(torch.eye(6, dtype=F64), 1, 0))
    for seed in range(20):
        x = torch.randn(6, 3, generator=seeded(seed), dtype=F64)
        assert gamma(expected_growth(ring, x)) >= 0.25 - 1e-12
    uniform = torch.full((6, 6), 1 / 6, dtype=F64)
    assert gamma(expected_growth(uniform, x)) == pytest.approx(0.25)  # the least value
    assert gamma(expected_growth(uniform, x, alpha=3.0)) < 0.1  # the mutant: it needs α² dσ² = 1


def test_eta_is_concentrated_as_lemma_a1_says():
    p, x = draw(12, 8, 1)
    y = steps(p, x, gaussian(2000, 8, 1))
    found, expected = growth(x.expand_as(y), y), expected_growth(p, x)
    values = eta(found, expected)
    largest = torch.maximum((found.mean - expected.mean).abs(), (found.diversity - expected.diversity).abs())
    t = values.abs().clamp(max=1)
    assert (largest >= gamma(expected) * t - 1e-12).all()
    assert not (largest >= 4 * gamma(expected) * t).all()  # the mutant


# --- Thm 2.6 --------------------------------------------------------------------------------------


@given(attention_and_tokens(min_tokens=3))
def test_the_bound_is_below_the_expectation_where_the_proof_s_margin_is_positive(sample: tuple[Tensor, Tensor]):
    p, x = sample
    bound = lower_bound(p, x)
    assume(bound.margin >= 0)
    assert expected_rate(p, x) >= bound.rate - 1e-9


@given(attention_and_tokens(min_tokens=3))
def test_the_theorem_speaks_of_an_escalation_where_it_applies(sample: tuple[Tensor, Tensor]):
    p, x = sample
    bound = lower_bound(p, x)
    assert bound.slack >= -1e-9  # (15) always holds
    assert bound.applies == (omega(p, x) + delta(p) < 1)
    assume(bound.applies)
    assert bound.rate >= 1


def test_the_bound_holds_in_monte_carlo_and_a_mutant_does_not():
    for seed in range(5):
        p, x = draw(32, 64, 1, seed)
        y = steps(p, x, gaussian(4000, 64, 1))
        mean, error = mean_and_error(escalation_rate(x.expand_as(y), y))
        bound = lower_bound(p, x)
        assert bound.applies
        assert mean > bound.rate.item() - 3 * error
        mutant = 1 + (1 + omega(p, x)).square().item() * token_similarity(x).item()  # ω with the wrong sign, no δ
        assert mean < mutant


def test_counter_example_to_the_theorem_as_printed():
    """It asks for a sub-gaussian norm of 1/√d. N(0, s²) has norm s√(8/3): at norm 1/√d its variance is 3/(8d),
    dσ² = 3/8, and E[r] stays far below (16), at any d and with every printed condition met."""
    n, d = 32, 256
    p = torch.softmax(0.5 * torch.randn(n, n, generator=seeded(0), dtype=F64), dim=-1)
    x = torch.randn(n, d, generator=seeded(1), dtype=F64) + 1
    s = math.sqrt(3 / 8 / d)
    grid = torch.randn(200_000, generator=seeded(2), dtype=F64) * s
    assert abs((grid.square() * d).exp().mean().item() - 2) < 0.05  # the norm K solves E exp(w²/K²) = 2: K = 1/√d
    y = steps(p.unsqueeze(0), x, s * torch.randn(200, 1, d, d, generator=seeded(3), dtype=F64))
    mean, error = mean_and_error(escalation_rate(x.expand_as(y), y))
    bound = lower_bound(p, x)
    assert bound.applies
    assert bound.slack > 1e-3
    assert mean < bound.rate.item() - 10 * error
    assert mean > lower_bound(p, x, alpha=math.sqrt(3 / 8)).rate.item() - 3 * error  # with the variance it holds


def test_symmetric_attention_has_the_spectral_bound():
    """Cor. 2.7: P symmetric makes ω = 0 and δ = |λ₂|, and (17) is (16)."""
    scores = torch.rand(8, 8, generator=seeded(0), dtype=F64)
    p = scores + scores.T
    for _ in range(500):  # Sinkhorn, kept symmetric
        scale = p.sum(dim=1).rsqrt()
        p = scale[:, None] * p * scale
    x = torch.randn(8, 5, generator=seeded(1), dtype=F64) + 0.5
    bound = lower_bound(p, x)
    assert bound.omega.abs() < 1e-10
    assert_close(spectral_estimate(p, x), bound.rate, rtol=1e-9, atol=0)
    skewed = torch.softmax(3 * torch.randn(8, 8, generator=seeded(2), dtype=F64), dim=-1)
    assert (spectral_estimate(skewed, x) - lower_bound(skewed, x).rate).abs() > 1e-3


def test_several_heads_average():
    p, x = draw(10, 6, 3)
    one = [expected_growth(p[k], x) for k in range(3)]
    assert_close(expected_growth(p, x).mean, torch.stack([e.mean for e in one]).mean(), rtol=1e-12, atol=0)
    assert_close(expected_growth(p[:1], x).mean, one[0].mean, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match="expected attention"):
        expected_growth(p.unsqueeze(0).unsqueeze(0), x)


def test_bounds_of_several_heads_take_the_mean_of_squares_and_ask_every_head():
    """One head nearly uniform, one that looks at single tokens: the theorem holds for the first alone."""
    _, x = draw(10, 6, 2)
    even = torch.softmax(0.1 * torch.randn(10, 10, generator=seeded(3), dtype=F64), dim=-1)
    sharp = torch.softmax(20 * torch.randn(10, 10, generator=seeded(4), dtype=F64), dim=-1)
    assert lower_bound(even, x).applies
    assert not lower_bound(sharp, x).applies
    both = torch.stack([even, sharp])
    assert not lower_bound(both, x).applies
    kept, gap = ((1 - omega(both, x)).square().mean(), delta(both).square().mean())
    similarity = token_similarity(x)
    assert_close(lower_bound(both, x, alpha=2).rate, 1 + 4 / (1 + 4 * gap) * (kept - gap) * similarity)
    square = second_eigenvalue(both).square().mean()
    estimate = 1 + 4 * (1 - square) / (1 + 4 * square) * similarity
    assert_close(spectral_estimate(both, x, alpha=2), estimate)


def test_asymptotic_rate_is_the_collapsed_limit():
    """With equal tokens but for a whisper, E[r] → 1 + α²: diversity shrinks by its inverse.

    In expectation, and in a draw of random weights; not under an attention that leaves some of the diversity.
    """
    p, x = draw(16, 64, 1)
    nearly = x.mean(dim=0) + 1e-6 * x
    uniform = torch.full((1, 16, 16), 1 / 16, dtype=F64)
    for alpha, gain in ((0.5, 1.0), (1.0, 1.0), (2.0, 1.0), (1.0, 3.0)):
        limit = 1 / expected_ratio(uniform, nearly, alpha=alpha, gain=gain).item()
        assert_close(limit, asymptotic_rate(alpha, gain), rtol=1e-9, atol=0)
        y = steps(uniform, nearly, gaussian(1000, 64, 1, gain), alpha)
        logs = (token_diversity(y) / token_diversity(nearly)).log()
        mean, error = mean_and_error(logs)
        # The logarithm of ξ₂/ξ₁ lies above that of the ratio of expectations by Var(ξ₁)/2E[ξ₁]²: at most 2/d.
        assert -4 * error < mean - math.log(asymptotic_rate(alpha, gain)) < 2 / 64 + 4 * error
        assert 1 / expected_ratio(p, nearly, alpha=alpha, gain=gain).item() > asymptotic_rate(alpha, gain) * (1 + 1e-3)
    assert asymptotic_rate() == 0.5


def test_pre_norm_energy_grows_as_equation_20_says():
    p, x = draw(16, 32, 2)
    normed = torch.nn.functional.layer_norm(x, (32,))
    mixed = p @ normed
    weights = gaussian(4000, 32, 2)
    y = x + (mixed @ weights).transpose(-3, -2).flatten(-2)
    mean, error = mean_and_error(y.square().sum(dim=(-2, -1)))
    assert abs(mean - expected_pre_norm_energy(p, x, normed).item()) < 4 * error
    assert mean > x.square().sum().item() + 10 * error
