"""δ and |λ₂| by products with vectors, together or streamed: against the dense forms, on many kinds of attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from depthscope import measures as m
from depthscope.measures import attention_spectra, krylov, operators
from depthscope.measures.attention_spectra import SWEEPS, Bounded
from depthscope.measures.operators import AttentionOperator
from depthscope.measures.sweeps import survey
from samples import seeded

N = 80  # above the size from which the dense form is left


def streamed(of: str, p: AttentionOperator | Tensor, real: Tensor | None = None) -> Bounded:
    """As of a head that is too large to be made: `of` is delta or second_eigenvalue."""
    operator = m.DenseAttention(p) if isinstance(p, Tensor) else p
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "STREAMED", 0)
        return getattr(m, f"bounded_{of}")(operator, real)


def naive_delta(p: Tensor) -> Tensor:
    p = p.double()
    return torch.linalg.matrix_norm(p - p.mean(dim=-2, keepdim=True), 2)


def naive_second_eigenvalue(p: Tensor) -> Tensor:
    """The spectral radius of P − 1p̄ᵀ."""
    p = p.double()
    return torch.linalg.eigvals(p - p.mean(dim=-2, keepdim=True)).abs().amax(dim=-1)


def scores(scale: float = 1.0, seed: int = 0) -> Tensor:
    return scale * torch.randn(1, N, N, generator=seeded(seed))


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, dim=-1)


def causal(x: Tensor) -> Tensor:
    return softmax(x.masked_fill(torch.ones(N, N, dtype=torch.bool).triu(1), -torch.inf))


def window(width: int, n: int = N) -> Tensor:
    away = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    return softmax(torch.randn(1, n, n, generator=seeded(0)).masked_fill(away > width, -torch.inf))


def two_rooms(door: float) -> Tensor:
    """Nearly reducible: two halves that hardly look at each other, λ₂ near 1."""
    room = torch.arange(N) < N // 2
    return softmax(scores() + torch.log(torch.where(room[:, None] == room, 1.0, door)))


KINDS: dict[str, Callable[[], Tensor]] = {
    "uniform": lambda: torch.full((1, N, N), 1 / N),
    "nearly uniform": lambda: softmax(scores(1e-4)),
    "random": lambda: softmax(scores(1.0)),
    "sharp": lambda: softmax(scores(8.0)),
    "one-hot": lambda: torch.eye(N)[torch.randint(N, (1, N), generator=seeded(1))],
    "permutation": lambda: torch.eye(N)[torch.randperm(N, generator=seeded(2))][None],
    "identity": lambda: torch.eye(N)[None],
    "two rooms": lambda: two_rooms(1e-3),
    "closed rooms": lambda: two_rooms(0.0),
    "causal": lambda: causal(scores()),
    "window": lambda: window(3),
    "repeated eigenvalues": lambda: 0.5 * torch.eye(N)[None] + 0.5 / N,
    "defective": lambda: 0.5 * torch.eye(N).roll(1, 0)[None] + 0.5 * torch.eye(N)[:1].expand(N, N)[None],
    "to the first token": lambda: torch.eye(N)[:1].expand(1, N, N),
    "low rank": lambda: softmax(torch.randn(1, N, 2, generator=seeded(3)) @ torch.randn(2, N, generator=seeded(4))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_attention_to_1e_5_and_inside_its_bound(kind: str):
    p = KINDS[kind]()
    for fast, naive in (
        (m.bounded_delta, naive_delta),
        (m.bounded_second_eigenvalue, m.second_eigenvalue),
    ):
        found, expected = fast(p), naive(p)
        # 1e-5 of the value; what is 0 in exact arithmetic is rounding in both forms.
        assert_close(found.value, expected, rtol=1e-5, atol=1e-9)
        assert (found.error <= 1e-5 * found.value + 1e-12).all()
        assert ((found.value - expected).abs() <= found.error + 1e-7 * expected + 1e-12).all()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_streamed_attention_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operators, "TILE", 20 * N)
    p = KINDS[kind]()
    operator = m.DenseAttention(p)
    found, expected = streamed("delta", operator), m.delta(p)
    assert ((found.value - expected).abs() <= found.error + 1e-6 * expected + 1e-12).all()
    assert_close(found.value, expected, rtol=2e-3, atol=1e-9)  # ten sweeps: the bound says what they reached
    eigenvalue, exact = streamed("second_eigenvalue", operator), m.second_eigenvalue(p)
    assert ((eigenvalue.value - exact).abs() <= eigenvalue.error + 1e-6 * exact + 1e-9).all()
    assert_close(m.attention_entropy(operator), m.attention_entropy(p), rtol=1e-6, atol=1e-12)
    x = torch.randn(1, N, 5, generator=seeded(5))
    assert_close(m.omega(operator, x), m.omega(p, x), rtol=1e-9, atol=1e-9)
    assert_close(tuple(m.mu(operator, x)), tuple(m.mu(p, x)), rtol=1e-9, atol=1e-12)


def test_equal_rows_are_exact():
    rows = softmax(torch.randn(1, 1, N, generator=seeded(0))).expand(1, N, N)
    for found in (
        m.bounded_delta(rows),
        m.bounded_second_eigenvalue(rows),
        streamed("delta", rows),
        streamed("second_eigenvalue", rows),
    ):
        assert found.value == 0
        assert found.error == 0


@pytest.mark.parametrize("of", ["delta", "second_eigenvalue"])
def test_the_dense_form_stands_behind_a_space_that_has_not_converged(of: str, monkeypatch: pytest.MonkeyPatch):
    """Half of the matrices are hard for a Krylov space: the bound finds that, and the dense form does them."""
    n = 400
    easy = softmax(torch.randn(1, n, 2, generator=seeded(3)) @ torch.randn(2, n, generator=seeded(4)))
    band = torch.ones(n, n).triu(-1).tril(1)  # its leading singular values and eigenvalues are close to each other
    p = torch.cat([easy, (band / band.sum(dim=-1, keepdim=True))[None]])
    called = []
    exact = getattr(m, of)
    monkeypatch.setattr(attention_spectra, of, lambda *given: called.append(len(given[0])) or exact(*given))
    found = getattr(m, f"bounded_{of}")(p)
    assert_close(found.value, exact(p), rtol=1e-5, atol=0)
    assert called == [1]
    monkeypatch.setattr(attention_spectra, "_DENSE_MOST", 10)  # without it, the bound is larger, and holds
    alone = getattr(m, f"bounded_{of}")(p)
    assert (alone.error[1] > 1e-5 * alone.value[1]).all()
    assert ((alone.value - exact(p)).abs() <= alone.error).all()


def with_sink(strength: float, place: int = 0, n: int = 400) -> m.ScoredAttention:
    """Causal attention that goes to one token, but for e^-strength of it: below that one, all rows are nearly equal."""
    q, k = torch.randn(2, 1, n, 8, generator=seeded(11))
    q[..., 0], k[..., 0] = 1.0, 0.0
    k[:, place, 0] = strength
    return m.ScoredAttention(q, k, 1.0, causal=True)


@pytest.mark.parametrize("strength", [20.0, 24.0, 28.0, 36.0, 60.0])
@pytest.mark.parametrize("place", [0, 3])
def test_under_a_sink_delta_keeps_its_digits_and_its_bound(strength: float, place: int):
    operator = with_sink(strength, place)
    expected = naive_delta(operator.dense())
    for found in (streamed("delta", operator), m.bounded_delta(operator.dense())):
        assert_close(found.value, expected, rtol=1e-5, atol=0)
        assert ((found.value - expected).abs() <= found.error).all()


def test_left_padding_and_a_sink():
    kept = torch.arange(400) >= 7
    operator = replace(with_sink(24.0, 7), mask=kept[None, None, :] | ~kept[None, :, None])
    expected = naive_delta(operator.dense()[:, 7:, 7:])
    assert_close(streamed("delta", operator, kept[None]).value, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shift", [5, 7])
def test_nearly_defective_eigenvalues_are_not_lost_in_the_centring(shift: int):
    """Tokens that look at those some places before them: a float32 mean moves |λ₂| by 1e-3."""
    place = torch.arange(N)
    p = softmax(-((place[:, None] - place - shift).abs() / 3.0)[None] + 0.1 * scores())
    expected = naive_second_eigenvalue(p)
    for found in (m.second_eigenvalue(p), m.bounded_second_eigenvalue(p).value):
        assert_close(found, expected, rtol=1e-6, atol=0)
    rounded = (p.double() - p.double().mean(dim=-2, keepdim=True)).float()
    with pytest.raises(AssertionError):
        assert_close(torch.linalg.eigvals(rounded.double()).abs().amax(dim=-1), expected, rtol=1e-6, atol=0)


def check_bound(value: Tensor, error: Tensor, expected: Tensor) -> None:
    assert ((value - expected).abs() <= error + 1e-6 * expected).all()


def test_the_bound_fails_for_mutants(monkeypatch: pytest.MonkeyPatch):
    """A space of one product, with the bound that a converged one would have; and a start that is not random."""
    p = softmax(scores(2.0)).double()
    c = p - p.mean(dim=-2, keepdim=True)

    def space(start: Tensor, steps: int) -> krylov.BlockKrylov:
        return krylov.BlockKrylov(lambda v: (v @ c.mT) @ c, start).extend(steps)

    start = krylov.random_rows(1, 4, N)
    expected = naive_delta(p).square()
    for steps in (1, 2, 4, 8):
        top, above = krylov.largest_of_symmetric(space(start, steps))
        check_bound(top, above, expected)
    early, _ = krylov.largest_of_symmetric(space(start, 1))
    with pytest.raises(AssertionError):
        check_bound(early, torch.zeros(1), expected)
    vectors = torch.linalg.eigh(c.mT @ c).eigenvectors[..., :-1]  # all but the leading one
    blind, above = krylov.largest_of_symmetric(space(vectors[..., -4:].mT.contiguous(), 3))
    with pytest.raises(AssertionError):
        check_bound(blind, above, expected)


def test_the_projection_onto_random_directions_is_no_shorter_than_said():
    """The chance is an upper bound, and no idle one: within a factor of 3 of what is drawn."""
    n, block, chance = 60, 4, 0.02
    drawn = torch.randn(20_000, n, generator=seeded(0), dtype=torch.float64)
    shorter = (drawn[:, :block].norm(dim=-1) / drawn.norm(dim=-1) < krylov.least_seen(n, block, chance)).double().mean()
    assert chance / 3 < shorter <= chance * 1.2


def padded(causal_: bool) -> tuple[m.ScoredAttention, Tensor]:
    q, k = 1.5 * torch.randn(2, 3, N, 8, generator=seeded(6))
    real = torch.ones(3, N, dtype=torch.bool)
    real[1, :30], real[2, -25:] = False, False
    allowed = real[:, None, :].expand(3, N, N)
    if causal_:
        allowed = allowed & torch.ones(N, N, dtype=torch.bool).tril()
    return m.ScoredAttention(q, k, 8**-0.5, allowed), real  # rows of padding may look nowhere: they are nan


@pytest.mark.parametrize("causal_", [True, False])
def test_padding_is_left_out(causal_: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operators, "TILE", 3 * 20 * N)
    operator, real = padded(causal_)
    for row, kept in enumerate(real):
        cropped = operator.dense()[row][kept][:, kept][None]
        for name, exact in (("delta", m.delta), ("second_eigenvalue", m.second_eigenvalue)):
            for found in (
                streamed(name, operator, real),
                getattr(m, f"bounded_{name}")(operator.dense(), real),
            ):
                assert (found.value[row] - exact(cropped)[0]).abs() <= found.error[row] + 1e-6
        assert_close(m.attention_entropy(operator, real)[row], m.attention_entropy(cropped)[0], rtol=1e-6, atol=0)
        x = torch.randn(3, N, 4, generator=seeded(7))
        own = m.mu(cropped, x[row][kept][None])
        assert_close(m.mu(operator, x, real).diversity[row], own.diversity[0], rtol=1e-6, atol=0)


def test_nan_and_one_token_have_no_number():
    p = torch.cat([KINDS["random"](), torch.full((1, N, N), torch.nan)])
    one = torch.arange(N) == 5
    alone = torch.eye(N).expand(1, N, N)
    for name in ("delta", "second_eigenvalue"):
        for found in (getattr(m, f"bounded_{name}")(p), streamed(name, p)):
            assert found.value[0].isfinite()
            assert found.value[1].isnan()
        for found in (getattr(m, f"bounded_{name}")(alone, one[None]), streamed(name, alone, one[None])):
            assert found.value == 0 if name == "delta" else found.value.isnan()


class LargestTensor(TorchDispatchMode):
    """Watches how many entries the largest tensor has that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                self.entries = max(self.entries, tensor.untyped_storage().nbytes() // tensor.element_size())
        return found


def entries_made(n: int, causal_: bool, compute: Callable[[m.ScoredAttention], object]) -> int:
    q, k = torch.randn(2, 1, n, 8, generator=seeded(9))
    operator = m.ScoredAttention(q, k, 0.35, causal=causal_)
    with LargestTensor() as watched, pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "STREAMED", 0)
        compute(operator)
    return watched.entries


STREAMED: dict[str, Callable[[m.ScoredAttention], object]] = {
    "delta": lambda p: m.bounded_delta(p),
    "second_eigenvalue": lambda p: m.bounded_second_eigenvalue(p),
    "omega": lambda p: m.omega(p, p.query),
    "mu": lambda p: m.mu(p, p.query),
    "entropy": lambda p: m.attention_entropy(p),
    "survey": lambda p: survey(p).mean_row,
}


@pytest.mark.parametrize("causal_", [True, False])
@pytest.mark.parametrize("name", STREAMED)
def test_no_tensor_grows_with_the_square_of_the_tokens(name: str, causal_: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operators, "TILE", 2**14)
    small, large = (entries_made(n, causal_, STREAMED[name]) for n in (512, 1024))
    assert large < 1024**2 / 4
    assert large <= 2.1 * small


def test_nothing_that_is_kept_holds_a_tile(monkeypatch: pytest.MonkeyPatch):
    """A view of a tile would keep all of it, and all tiles are the matrix."""
    monkeypatch.setattr(operators, "TILE", 2**12)
    q, k = torch.randn(2, 1, 256, 8, generator=seeded(9))
    found = survey(m.ScoredAttention(q, k, 0.35))
    kept = [value for value in vars(found).values() if isinstance(value, Tensor)]
    assert len(kept) > 5
    assert sum(value.untyped_storage().nbytes() for value in kept) < 256 * 64


def test_the_watch_sees_a_matrix():
    assert entries_made(512, False, lambda p: p.dense()) == 512**2


@pytest.mark.parametrize("name", ["delta", "second_eigenvalue"])
def test_no_more_than_ten_sweeps(name: str, monkeypatch: pytest.MonkeyPatch):
    taken = []
    tiles = m.ScoredAttention.tiles
    monkeypatch.setattr(m.ScoredAttention, "tiles", lambda self: taken.append(1) or tiles(self))
    q, k = 3 * torch.randn(2, 1, 256, 8, generator=seeded(10))
    streamed(name, m.ScoredAttention(q, k, 0.35))
    assert 2 <= len(taken) <= SWEEPS
    taken.clear()
    streamed("second_eigenvalue", m.ScoredAttention(q, k, 0.35, causal=True))
    assert len(taken) == 1


def test_the_start_is_the_same_at_every_call_and_leaves_the_global_state():
    before = torch.get_rng_state()
    first, second = (krylov.random_rows(2, 3, 50) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), before)
    assert_close(first @ first.mT, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), rtol=0, atol=1e-12)
