"""Measures of weight products against the product itself, formed and decomposed."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from depthscope.measures.weights import (
    asymmetry,
    mean_growth,
    mimetic_score,
    negative_share,
    negative_trace,
    positive_trace,
    product_eigenvalues,
    spectral_radius,
)
from samples import seeded

F64 = torch.float64


def pair(d: int, k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(d, k, generator=seeded(seed), dtype=F64), torch.randn(
        k, d, generator=seeded(seed + 1), dtype=F64
    )


def by_size(values: Tensor) -> Tensor:
    order = sorted(values.tolist(), key=lambda v: (-round(abs(v), 8), round(v.real, 8), round(v.imag, 8)))
    return torch.tensor(order)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 999))
def test_the_small_product_has_the_eigenvalues_of_the_large_one(d: int, k: int, seed: int):
    left, right = pair(d, k, seed)
    found, dense = product_eigenvalues(left, right), torch.linalg.eigvals(left @ right)
    assert len(found) == min(d, k)
    scale = dense.abs().max().item()
    assert_close(by_size(found), by_size(dense)[: min(d, k)], atol=1e-7 * scale, rtol=1e-7)


@given(st.integers(2, 8), st.integers(1, 8), st.integers(0, 999))
def test_symmetry_and_identity_against_the_formed_product(d: int, k: int, seed: int):
    left, right = pair(d, k, seed)
    h = left @ right
    assert_close(asymmetry(left, right), (h - h.T).norm() / (2 * h.norm()), atol=1e-7, rtol=1e-9)
    assert_close(mimetic_score(left, right), h.trace() / (math.sqrt(d) * h.norm()), atol=1e-12, rtol=1e-9)
    transposed = (h - h.T).norm() / h.norm()  # the mutant, without the 2
    assert transposed < 1e-7 or not math.isclose(transposed, asymmetry(left, right).item(), rel_tol=1e-3)


def test_planted_products():
    eye = torch.eye(6, dtype=F64)
    assert mimetic_score(-2 * eye, eye).item() == pytest.approx(-1)
    assert asymmetry(eye, eye).item() == 0
    skew = pair(6, 6)[0] - pair(6, 6)[0].T
    assert asymmetry(skew, eye).item() == pytest.approx(1)
    values = product_eigenvalues(torch.diag(torch.tensor([-3.0, -1.0, 2.0, 0.0])), torch.eye(4))
    assert negative_share(values).item() == pytest.approx(2 / 3)  # zero is neither
    assert (positive_trace(values).item(), negative_trace(values).item()) == (2, -4)
    assert (spectral_radius(values).item(), mean_growth(values).item()) == (3, 3)


def test_products_that_say_nothing_are_nan():
    zero = torch.zeros(4, 2)
    assert negative_share(product_eigenvalues(zero, zero.T)).isnan()
    assert asymmetry(zero, zero.T).isnan()
    assert mimetic_score(zero, zero.T).isnan()


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (torch.ones(4, 2), torch.ones(3, 4), r"expected shapes \(…, d, k\) and \(…, k, d\), got \(4, 2\) and \(3, 4\)"),
        (torch.full((4, 2), torch.nan), torch.ones(2, 4), "expected finite weights"),
        (torch.ones(4, 2), torch.full((2, 4), torch.inf), "expected finite weights"),
    ],
)
def test_bad_products_are_refused(left: Tensor, right: Tensor, expected: str):
    with pytest.raises(ValueError, match=expected):
        product_eigenvalues(left, right)


@pytest.mark.parametrize("size", [1e-150, 1e-100, 1e-30, 1e30, 1e100, 1e150])
def test_the_size_of_the_weights_changes_nothing_but_the_size_of_the_eigenvalues(size: float):
    left, right = pair(8, 3)
    expected = product_eigenvalues(left, right)
    assert_close(product_eigenvalues(size * left, right / size), expected)
    assert_close(product_eigenvalues(size * left, right) / size, expected)
    for measure in (asymmetry, mimetic_score):
        assert_close(measure(size * left, size * right), measure(left, right))


def test_a_product_that_is_zero_to_rounding_has_no_signs():
    """L and R of orthogonal directions: H is of rank 4, and all of its eigenvalues are 0."""
    q, _ = torch.linalg.qr(torch.randn(16, 16, generator=seeded(0), dtype=F64))
    values = product_eigenvalues(q[:, :4], q[:, 4:8].mT)
    assert (q[:, 4:8].mT @ q[:, :4]).abs().max() > 0
    assert (values == 0).all()
    assert negative_share(values).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_few_bits_are_read_as_the_numbers_that_they_hold(dtype: torch.dtype):
    left, right = (weight.to(dtype) for weight in pair(8, 3))
    assert_close(product_eigenvalues(left, right), product_eigenvalues(left.double(), right.double()))
    assert_close(asymmetry(left, right), asymmetry(left.double(), right.double()))
    bad = torch.full((8, 3), torch.nan).to(dtype)
    with pytest.raises(ValueError, match="expected finite weights"):
        product_eigenvalues(bad, right)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int8])
def test_what_is_no_real_number_is_refused(dtype: torch.dtype):
    left, right = pair(8, 3)
    with pytest.raises(ValueError, match=r"expected real weights, got (complex64|int8)"):
        product_eigenvalues(left.to(dtype), right)
