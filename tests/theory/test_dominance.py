"""Dominating eigenvalues against the naive way: the nd × nd matrix itself, squared until one eigenvalue is left."""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from depthscope.theory import Dominance, dominance_of, mean_wins, pair_eigenvalues, tokens_after
from samples import seeded

F64 = torch.float64
KINDS = ("negative", "skew", "singular", "multiple", "any", "kernel", "positive")


class End(NamedTuple):
    """What became of the tokens after 2^14 blocks."""

    equal: bool
    aligned: bool
    rank: int


def attention(n: int, seed: int, *, causal: bool = False) -> Tensor:
    logits = 2 * torch.randn(n, n, generator=seeded(seed), dtype=F64)
    return (logits.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf) if causal else logits).softmax(dim=-1)


def value_weights(kind: str, d: int, seed: int) -> Tensor:
    h = torch.randn(d, d, generator=seeded(seed), dtype=F64)
    if kind in ("negative", "positive"):
        return (1 if kind == "positive" else -1) * h @ h.T / torch.linalg.matrix_norm(h @ h.T, 2)
    if kind == "skew":
        return h - h.T
    if kind == "singular":
        return h @ torch.diag((torch.arange(d) > 0).to(F64)) @ torch.randn(d, d, generator=seeded(seed + 1), dtype=F64)
    if kind == "multiple":
        return -3 * torch.rand((), generator=seeded(seed), dtype=F64) * torch.eye(d, dtype=F64)
    if kind == "kernel":  # sharpens, but for a kernel of dimension d // 2
        basis = torch.linalg.qr(h).Q
        return (
            basis
            @ torch.diag(-torch.rand(d, generator=seeded(seed), dtype=F64).clamp(0.3) * (torch.arange(d) >= d // 2))
            @ basis.T
        )
    return h


def end_of(a: Tensor, h: Tensor, seed: int) -> End:
    """The oracle: vec(X) → (I + Hᵀ⊗A)vec(X), with the matrix formed and squared 14 times."""
    n, d = len(a), len(h)
    step = torch.eye(n * d, dtype=F64) + torch.kron(h.T.contiguous(), a)
    for _ in range(14):
        step = step @ step
        step = step / step.norm()
    x = (step @ torch.randn(n * d, generator=seeded(seed), dtype=F64)).reshape(d, n).T
    mean = x.mean(dim=0)
    directions = x / x.norm(dim=1, keepdim=True)
    sigma = torch.linalg.svdvals(x)
    return End(
        equal=((x - mean).norm() < 1e-4 * n**0.5 * mean.norm()).item() is True,
        aligned=((directions @ directions.T).min() > 1 - 1e-6).item() is True,
        rank=int((sigma > 1e-6 * sigma[0]).sum()),
    )


def is_settled(a: Tensor, h: Tensor) -> bool:
    """Whether 2^14 blocks are enough: what does not dominate is smaller by .5 % per block."""
    moduli = pair_eigenvalues(torch.linalg.eigvals(a), torch.linalg.eigvals(h)).abs().flatten()
    below = moduli[moduli < (1 - 1e-7) * moduli.max()]
    return not len(below) or bool(below.max() < 0.995 * moduli.max())


def cases(count: int) -> list[tuple[Tensor, Tensor, int]]:
    drawn = []
    for seed in range(count):
        n, d = 2 + seed % 4, 1 + (seed // 4) % 4
        a = attention(n, 7 * seed, causal=seed % 3 == 0)
        h = value_weights(KINDS[seed % len(KINDS)], d, 7 * seed + 3)
        if is_settled(a, h):
            drawn.append((a, h, seed))
    return drawn


def disagreements(found: list[tuple[Dominance, End]]) -> int:
    return sum(
        said.input_convergence != end.equal
        or said.angle_convergence not in (None, end.aligned)
        or said.rank not in (None, end.rank)
        for said, end in found
    )


def test_what_dominates_agrees_with_the_whole_matrix_in_two_thousand_cases():
    drawn = cases(2200)
    found = [(dominance_of(a, h), end_of(a, h, seed)) for a, h, seed in drawn]
    assert len(found) > 2000
    assert disagreements(found) == 0
    kinds = Counter((said.input_convergence, said.angle_convergence, said.rank) for said, _ in found)
    assert {(True, True, 1), (False, False, 1), (False, None, 1), (False, False, 2)} <= set(kinds)  # every row is tried


def test_a_real_spectrum_is_not_enough():
    """The mutant: the paper's assumption. With the imaginary parts dropped, many cases come out wrong."""
    drawn = cases(300)

    def real_only(a: Tensor, h: Tensor) -> bool:
        lam, mu = torch.linalg.eigvals(a).real, torch.linalg.eigvals(h).real
        lam = lam[(lam - 1).abs().argsort()]
        moduli = (1 + lam[:, None] * mu).abs()
        return bool(moduli[0].max() > (1 + 1e-9) * moduli[1:].max())

    assert sum(real_only(a, h) != end_of(a, h, seed).equal for a, h, seed in drawn) > 5


@given(st.floats(-0.99, 0.99), st.complex_numbers(max_magnitude=4, allow_nan=False))
def test_the_condition_is_the_outside_of_a_disc(smallest: float, mu: complex):
    """|μ + 1/(1+λ)| > 1/(1+λ) for real λ, which is |1+μ| > |1+λμ|, wherever rounding does not decide."""
    gap = abs(1 + mu) - abs(1 + smallest * mu)
    centre = 1 / (1 + smallest)
    if abs(gap) < 1e-9:
        return
    said = mean_wins(torch.tensor(smallest), torch.tensor(mu)).item()
    assert said == (gap > 0) == (abs(mu + centre) > centre)


def test_the_condition_holds_at_weights_near_zero():
    """|1+μ| and |1+λμ| are equal to rounding there; the difference is not."""
    mu = torch.tensor([1e-18, -1e-18, 1e-18j, -1e-300], dtype=torch.complex128)
    assert mean_wins(torch.tensor(0.5), mu).tolist() == [True, False, True, False]
    assert mean_wins(torch.tensor(0.5), torch.tensor([-1.33, -1.34])).tolist() == [False, True]  # −2/(1+λ) = −4/3


@pytest.mark.parametrize(("scale", "smooths"), [(1.0, True), (0.2, True), (-0.2, False), (-1.0, False), (-2.1, True)])
def test_a_too_negative_weight_smooths_again(scale: float, smooths: bool):
    x = torch.randn(12, 4, generator=seeded(5), dtype=F64)
    a = (x @ x.T).softmax(dim=-1)  # similar to a positive matrix: λ_n > 0, so that −2/(1+λ_n) > −2
    found = dominance_of(a, scale * torch.eye(4, dtype=F64))
    assert found.input_convergence == smooths
    assert (found.rate < 1) == smooths


@pytest.mark.parametrize("depth", [0, 1, 7, 40])
def test_the_closed_form_is_the_repeated_step(depth: int):
    a, h, x = attention(6, 1), value_weights("any", 5, 2), torch.randn(6, 5, generator=seeded(3), dtype=F64)
    repeated = x
    for _ in range(depth):
        repeated = repeated + a @ repeated @ h
    assert_close(tokens_after(x, a, h, depth), repeated, rtol=1e-9, atol=1e-9 * repeated.abs().max().item())


def test_the_rate_is_the_measured_one():
    a, h = attention(8, 4), value_weights("positive", 6, 5)
    x = torch.randn(8, 6, generator=seeded(6), dtype=F64)

    def ratio(depth: int) -> float:
        end = tokens_after(x, a, h, depth)
        return ((end - end.mean(dim=0)).norm() / end.mean(dim=0).norm()).item()

    assert (ratio(30) / ratio(20)) ** 0.1 == pytest.approx(dominance_of(a, h).rate, rel=1e-3)


def test_the_degenerate_cases():
    eye = torch.eye(3, dtype=F64)
    assert dominance_of(torch.ones(1, 1), eye).input_convergence  # one token is its own mean
    assert dominance_of(eye, eye).input_convergence is False  # every token looks at itself
    vanished = dominance_of(eye, -eye)  # X − X
    assert (vanished.rank, vanished.modulus) == (0, 0.0)
    jordan = dominance_of(attention(3, 1), torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    assert (jordan.rank, jordan.angle_convergence) == (None, None)
    zero = dominance_of(attention(4, 2), torch.zeros(3, 3))
    assert (zero.input_convergence, zero.rank) == (False, 3)  # nothing moves


@pytest.mark.parametrize(
    ("a", "h", "expected"),
    [
        (torch.ones(2, 3), torch.eye(2), r"expected square attention, got \(2, 3\)"),
        (torch.eye(2), torch.full((2, 2), torch.nan), "expected finite weights"),
        (torch.ones(2, 2), torch.eye(2), "expected row-stochastic attention, got rows that sum to 1 ± 1e\\+00"),
        (torch.tensor([[2.0, -1.0], [0.0, 1.0]]), torch.eye(2), "expected row-stochastic attention"),
    ],
)
def test_bad_input_is_refused(a: Tensor, h: Tensor, expected: str):
    with pytest.raises(ValueError, match=expected):
        dominance_of(a, h)


def test_a_closed_form_without_eigenvectors_is_refused():
    with pytest.raises(ValueError, match="expected weights with independent eigenvectors"):
        tokens_after(torch.ones(3, 2), attention(3, 1), torch.tensor([[0.0, 1.0], [0.0, 0.0]]), 5)
