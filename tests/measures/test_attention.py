"""δ, |λ₂|, ω, μ against their definitions, and the bounds of Lemma 2.4 with mutants."""

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.testing import assert_close

from depthscope.measures import attention_entropy, delta, mu, omega, second_eigenvalue
from samples import attention_and_tokens, seeded

F64 = torch.float64


def centring(n: int) -> Tensor:
    return torch.eye(n, dtype=F64) - 1 / n


@given(attention_and_tokens())
def test_equal_the_definitions(sample: tuple[Tensor, Tensor]):
    p, x = sample
    n = len(x)
    e, centre = torch.full((n,), n**-0.5, dtype=F64), centring(n)
    # The naive forms lose digits where P is close to uniform and X to its mean: their error is about
    # ε‖X‖/‖Π⊥X‖, at most 1e-16 / 1e-4.
    assert_close(delta(p), torch.linalg.matrix_norm(centre @ p, 2), rtol=1e-11, atol=1e-14)
    moduli = torch.linalg.eigvals(p).abs().sort().values
    assert_close(second_eigenvalue(p), moduli[-2], rtol=1e-7, atol=1e-9)
    assert_close(omega(p, x), (e @ p @ centre @ x).norm() / (e @ x).norm(), rtol=1e-9, atol=1e-12)
    px = p @ x
    expected = (e @ px).norm() / (e @ x).norm(), (centre @ px).norm() / (centre @ x).norm()
    assert_close(tuple(mu(p, x)), expected, rtol=1e-9, atol=1e-12)
    assert_close(attention_entropy(p), -(p * p.log()).sum(dim=-1).mean(), rtol=1e-12, atol=0)


def check_lemma(mu1: Tensor, mu2: Tensor, omega_: Tensor, delta_: Tensor) -> None:
    """Lemma 2.4, eq. 11, in the form that also holds for ω > 1: μ₁ ≥ 1 − ω and μ₂ ≤ δ."""
    assert mu1 >= 1 - omega_ - 1e-12
    assert mu2 <= delta_ + 1e-12


@given(attention_and_tokens())
def test_bounds_of_the_lemma(sample: tuple[Tensor, Tensor]):
    p, x = sample
    check_lemma(*mu(p, x), omega(p, x), delta(p))
    assert second_eigenvalue(p) <= delta(p) + 1e-12


def test_bounds_fail_for_mutants():
    p = torch.softmax(3 * torch.randn(8, 8, generator=seeded(0), dtype=F64), dim=-1)
    worst = torch.linalg.svd(centring(8) @ p).Vh[0]  # the direction in which P keeps the most diversity
    x = worst[:, None] + 0.1
    with pytest.raises(AssertionError):
        check_lemma(*mu(p, x), omega(p, x), second_eigenvalue(p))  # |λ₂| in place of δ
    against = -centring(8) @ p.mean(dim=0)[:, None]  # what attention takes out of the mean: all of it
    opposed = against + against.square().sum()
    with pytest.raises(AssertionError):
        check_lemma(*mu(p, opposed), torch.zeros((), dtype=F64), delta(p))  # ω left out


def test_collapsed_attention_is_exact():
    """Equal rows: δ and |λ₂| are 0, not 1e-8."""
    rows = torch.softmax(torch.randn(1, 64, generator=seeded(0)), dim=-1).expand(64, 64)
    assert delta(rows) == 0
    assert second_eigenvalue(rows) == 0


def test_doubly_stochastic_and_one_hot():
    ring = torch.roll(torch.eye(6), 1, dims=0)
    x = torch.randn(6, 3, generator=seeded(0))
    assert omega(ring, x) < 1e-7
    assert_close(second_eigenvalue(ring), torch.tensor(1.0, dtype=F64))
    assert attention_entropy(ring) == 0
    assert_close(attention_entropy(torch.full((6, 6), 1 / 6)), torch.tensor(6.0, dtype=F64).log(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("n", "most"), [(2, 0.5), (64, 1.24)])
def test_uniform_causal_attention(n: int, most: float):
    """λ₂ = ½ (its diagonal is 1/i) and δ > 1 for longer sequences, where Thm 2.6 does not apply."""
    p = torch.tril(torch.ones(n, n)) / torch.arange(1, n + 1)[:, None]
    assert second_eigenvalue(p) == 0.5
    assert_close(delta(p), torch.tensor(most, dtype=F64), rtol=0, atol=5e-3)


def test_a_causal_matrix_with_an_identity_row_keeps_its_eigenvalue():
    assert second_eigenvalue(torch.eye(5)) == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [True, False])
def test_masked_equals_cropped(causal: bool, left: bool):
    scores = torch.randn(2, 3, 6, 6, generator=seeded(0), dtype=F64)
    if causal:
        scores = scores.masked_fill(torch.ones(6, 6, dtype=torch.bool).triu(1), -torch.inf)
    p, x = torch.softmax(scores, dim=-1), torch.randn(2, 1, 6, 4, generator=seeded(1), dtype=F64)
    where = slice(3, 9) if left else slice(0, 6)
    padded_p = torch.full((2, 3, 9, 9), 1 / 9, dtype=F64)
    padded_p[..., where, :] = 0
    padded_p[..., where, where] = p
    padded_x = torch.full((2, 1, 9, 4), torch.nan, dtype=F64)
    padded_x[..., where, :] = x
    mask = torch.zeros(2, 1, 9)
    mask[..., where] = 1
    for measure in (delta, second_eigenvalue, attention_entropy):
        assert_close(measure(padded_p, mask), measure(p), rtol=1e-12, atol=1e-13)
    assert_close(omega(padded_p, padded_x, mask), omega(p, x), rtol=1e-12, atol=0)
    assert_close(tuple(mu(padded_p, padded_x, mask)), tuple(mu(p, x)), rtol=1e-12, atol=0)
    with pytest.raises(AssertionError):
        assert_close(delta(padded_p), delta(p), rtol=1e-12, atol=1e-13)


def test_a_matrix_does_not_depend_on_the_others_in_its_batch():
    """A causal matrix in a batch with a full one: its spectrum is still its diagonal, not what a solver makes of it."""
    n = 400
    half = 0.5 * (torch.eye(n, dtype=F64) + torch.eye(n, dtype=F64).roll(1, 0).tril())
    half[0, 0] = 1
    full = torch.softmax(torch.randn(n, n, generator=seeded(0), dtype=F64), dim=-1)
    assert second_eigenvalue(half) == 0.5
    assert second_eigenvalue(torch.stack([half, full]))[0] == 0.5


def test_a_mask_without_an_axis_for_the_heads_is_refused():
    p = torch.full((3, 3, 4, 4), 0.25)
    with pytest.raises(ValueError, match="an axis for the heads"):
        delta(p, torch.ones(3, 4))
