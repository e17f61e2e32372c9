"""The split tokens against 400 digits: every step, and whole networks down to residuals of 1e-250 and below."""

import math

import pytest
import torch
from mpmath import mp, mpf
from torch import Tensor
from torch.testing import assert_close

import exact_layers as exact
from depthscope.measures import composite_norm
from depthscope.theory import Heads, Mlp, SplitTokens, attend, attend_causally, feed_forward, normalise
from depthscope.theory.differences import ACTIVATIONS, activation_named
from depthscope.theory.residuals import attention_gap, split_scores
from samples import seeded

F64 = torch.float64
N, D, K, H = 4, 3, 2, 2


def normal(generator: torch.Generator, *shape: int, deviation: float = 1.0) -> Tensor:
    return deviation * torch.randn(*shape, generator=generator, dtype=F64)


def heads_of(generator: torch.Generator, heads: int = H) -> Heads:
    return Heads(
        query=normal(generator, heads, D, K),
        key=normal(generator, heads, D, K),
        value=normal(generator, heads, D, D, deviation=0.7),
        query_bias=normal(generator, heads, K),
        bias=normal(generator, D),
    )


def mlp_of(generator: torch.Generator, activation: str) -> Mlp:
    sizes = ((D, 5), (5, D), (5,), (D,))
    return Mlp(*(normal(generator, *size) for size in sizes), activation=activation)


def agree(found: SplitTokens, expected: exact.Matrix) -> bool:
    """To ten digits; equal tokens (a ReLU that is 0 everywhere) are equal in both."""
    wanted = torch.tensor(exact.deviations(expected), dtype=F64)
    return (composite_norm(found.residual - wanted) <= 1e-10 * composite_norm(wanted)).item()


def start(generator: torch.Generator, size: float) -> tuple[SplitTokens, exact.Matrix]:
    """1xᵀ + size·R, also with all the digits of x and of R."""
    shared, residual = normal(generator, D), size * normal(generator, N, D)
    residual = residual - residual.mean(dim=-2, keepdim=True)
    return SplitTokens(shared, residual), exact.plus_row(exact.exact(residual), shared)


def layer(kind: str, split: SplitTokens, whole: exact.Matrix, generator: torch.Generator):
    """One layer both ways: attention, and what `kind` names besides."""
    heads = heads_of(generator)
    mlp = mlp_of(generator, kind if kind in ACTIVATIONS else "relu")
    if kind == "causal":
        return attend_causally(split, heads), exact.attention(whole, heads, causal=True)
    attended, attended_whole = attend(split, heads), exact.attention(whole, heads)
    if kind == "skip":
        return split + attended, exact.plus(whole, attended_whole)
    if kind == "norm":
        return normalise(attended), exact.layer_norm(attended_whole, torch.ones(D), torch.zeros(D), 1e-5)
    if kind in ACTIVATIONS:
        return feed_forward(attended, mlp), exact.mlp(attended_whole, mlp)
    return attended, attended_whole


COLLAPSING = ["plain", "norm", *ACTIVATIONS]


@pytest.mark.parametrize("kind", [*COLLAPSING, "skip", "causal"])
@pytest.mark.parametrize("size", [3.0, 0.3, 1e-4, 1e-30, 1e-86])
def test_a_layer_keeps_ten_digits_of_any_residual(kind: str, size: float):
    with exact.workdps(exact.DIGITS):
        for seed in range(3):
            generator = seeded(seed)
            found, expected = layer(kind, *start(generator, size), generator)
            assert agree(found, expected)


@pytest.mark.parametrize("kind", COLLAPSING)
@pytest.mark.parametrize(("size", "layers", "reached"), [(0.1, 5, 1e-80), (1e-10, 3, 1e-250), (1e-29, 2, 1e-250)])
def test_a_collapse_is_followed_over_layers(kind: str, size: float, layers: int, reached: float):
    generator = seeded(2)
    with exact.workdps(exact.DIGITS):
        split, whole = start(generator, size)
        for _ in range(layers):
            split, whole = layer(kind, split, whole, generator)
            if composite_norm(split.residual) < 1e-97:
                break  # the next would leave float64
        assert agree(split, whole)
    assert composite_norm(split.residual) < reached


def test_plain_float64_fails_where_the_split_one_holds():
    """The mutant: the same numbers on whole tokens."""
    generator = seeded(0)
    with exact.workdps(exact.DIGITS):
        split, _ = start(generator, 1e-4)
        heads = heads_of(generator)
        wanted = torch.tensor(exact.deviations(exact.attention(exact.exact(split.tokens), heads)), dtype=F64)
    x = split.tokens
    scores = (x @ heads.query + heads.query_bias.unsqueeze(-2)) @ (x @ heads.key).mT / math.sqrt(K)
    y = (torch.softmax(scores, dim=-1) @ x @ heads.value).sum(dim=0) + heads.bias
    error = composite_norm(y - y.mean(dim=-2, keepdim=True) - wanted) / composite_norm(wanted)
    assert error > 1e-5  # 5 digits at most are left of a residual of 1e-12; of 1e-17 none


def test_a_residual_below_the_numbers_of_float64_becomes_zero_and_stays_so():
    generator = seeded(0)
    tokens = SplitTokens(normal(generator, D), 1e-200 * normal(generator, N, D))
    for _ in range(2):
        tokens = attend(tokens, heads_of(generator))
        assert (tokens.residual == 0).all()
        assert tokens.shared.isfinite().all()


def test_huge_scores_do_not_overflow():
    generator = seeded(0)
    tokens, heads = SplitTokens.of(1e3 * normal(generator, N, D)), heads_of(generator)
    x = tokens.tokens
    scores = (x @ heads.query + heads.query_bias.unsqueeze(-2)) @ (x @ heads.key).mT / math.sqrt(K)
    expected = (torch.softmax(scores, dim=-1) @ x @ heads.value).sum(dim=0) + heads.bias
    assert_close(attend(tokens, heads).tokens, expected, rtol=1e-9, atol=1e-9)


def in_front(generator: torch.Generator, nats: float, *, n: int = 6, heads: int = 1) -> tuple[SplitTokens, Heads]:
    """Tokens and heads whose query bias puts token 0 in front of all others by `nats`.

    It asks for the last feature, which only token 0 has; what else is asked for is of the order of 1.
    """
    residual = normal(generator, n, D)
    residual[:, -1] = 0.0
    residual[0, -1] = 1.0
    residual = residual - residual.mean(dim=-2, keepdim=True)
    query, key = (normal(generator, heads, D, K, deviation=0.5) for _ in range(2))
    query[..., 0] = key[..., 0] = 0.0
    key[:, -1, 0] = 1.0
    bias = torch.zeros(heads, K, dtype=F64)
    bias[:, 0] = nats * math.sqrt(K)
    return (
        SplitTokens(normal(generator, D), residual),
        Heads(query, key, normal(generator, heads, D, D), query_bias=bias, bias=normal(generator, D)),
    )


def both_ways(tokens: SplitTokens, heads: Heads, causal: bool) -> tuple[SplitTokens, exact.Matrix]:
    whole = exact.plus_row(exact.exact(tokens.residual), tokens.shared)
    step = attend_causally if causal else attend
    return step(tokens, heads), exact.attention(whole, heads, causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_a_token_that_all_rows_attend_to_leaves_ten_digits(causal: bool, heads: int):
    """0 to 620 nats: what is left of the residual falls below 1e-260."""
    smallest = math.inf
    with exact.workdps(exact.DIGITS + 300):
        for nats in (0.0, 1.0, 10.0, 20.0, 40.0, 80.0, 120.0, 200.0, 400.0, 620.0):
            for size in (1.0, 1e-2):
                tokens, weights = in_front(seeded(int(nats)), nats / size, heads=heads)
                tokens = tokens.scaled(size)
                found, expected = both_ways(tokens, weights, causal)
                smallest = min(smallest, composite_norm(found.residual).item())
                assert agree(found, expected), (nats, size)
                assert_close(found.shared, torch.tensor(exact.mean(expected), dtype=F64), rtol=1e-12, atol=1e-12)
    assert 1e-285 < smallest < 1e-260


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_a_trained_size_leave_ten_digits(causal: bool):
    """Scores of some hundred, in which each row attends to a token of its own or all to one, as it happens."""
    with exact.workdps(exact.DIGITS):
        for seed in range(12):
            generator = seeded(seed)
            tokens, weights = SplitTokens.of(normal(generator, 5, D)), heads_of(generator, 3)
            tokens = tokens.scaled(10 ** (-1.0 * (seed % 3)))
            found, expected = both_ways(tokens, weights._replace(query=(1 + 8 * seed) * weights.query), causal)
            if composite_norm(found.residual) >= 1e-280:
                assert agree(found, expected), seed


def test_tokens_that_are_nearly_the_one_all_rows_attend_to():
    """Of three tokens a, a + δ and b, the first two have all of the attention: what is left is of the order of δ²."""
    with exact.workdps(exact.DIGITS):
        for delta in (0.0, 1e-3, 1e-9):
            generator = seeded(3)
            tokens, weights = in_front(generator, 60.0, n=3)
            residual = tokens.residual.clone()
            residual[1] = residual[0] + delta * normal(generator, D)
            assert agree(*both_ways(SplitTokens(tokens.shared, residual), weights, causal=False))


def test_each_entry_of_the_gap_is_right():
    """p_ij − q_j, entry by entry, and rows that sum to 0 to rounding."""
    generator = seeded(5)
    with exact.workdps(exact.DIGITS):
        for size in (0.5, 1e-3, 1e-12, 1e-120):
            tokens, _ = start(generator, size)
            scores = split_scores(tokens, heads_of(generator))
            q, gap = attention_gap(scores)
            assert (gap.sum(dim=-1).abs() < 1e-15 * gap.abs().amax(dim=-1)).all()
            for h in range(H):
                common = [mp.exp(mpf(value)) for value in scores.common[h, 0].tolist()]
                for i in range(N):
                    varied = [c * mp.exp(mpf(e)) for c, e in zip(common, scores.varying[h, i].tolist(), strict=True)]
                    wanted = [v / mp.fsum(varied) - c / mp.fsum(common) for v, c in zip(varied, common, strict=True)]
                    error = max(abs(mpf(gap[h, i, j].item()) - wanted[j]) for j in range(N))
                    assert error < 1e-14 * max(abs(value) for value in wanted)
            assert_close(q.sum(dim=-1), torch.ones(H, 1, dtype=F64))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_differences_of_activations(name: str):
    """Each entry to 1e-12 for steps of every size; of GELU, 1e-12 of the larger of their two terms."""
    a = torch.cat([torch.linspace(-12, 12, 49, dtype=F64) + 0.123, torch.tensor([0.0, -36.0, 36.0], dtype=F64)])
    phi, difference = exact.ACTIVATIONS[name], ACTIVATIONS[name].difference
    with exact.workdps(exact.DIGITS):
        for size in (20.0, 2.0, 0.9, 0.3, 0.01, 1e-8, 1e-30, 1e-250):
            for b in (torch.full_like(a, size), torch.full_like(a, -size)):
                found = difference(a, b)
                for start_at, step, got in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
                    end = mpf(start_at) + mpf(step)
                    wanted = phi(end) - phi(mpf(start_at))
                    second = mpf(step) * phi(end) / end if name == "gelu" and end != 0 else 0  # b·Φ(a + b)
                    # A zero of the cosine between two floats is met to their rounding.
                    second = min(abs(mpf(step)), 1) * 1e-2 if name == "sine" else second
                    scale = max(abs(wanted), abs(second))
                    assert abs(mpf(got) - wanted) <= 1e-12 * scale + 1e-300, (start_at, step)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_lipschitz_constants_are_reached_and_not_exceeded(name: str):
    a = torch.linspace(-6, 6, 100_001, dtype=F64)
    slopes = ACTIVATIONS[name].difference(a, torch.full_like(a, 1e-30)).abs() / 1e-30
    assert slopes.max().item() == pytest.approx(ACTIVATIONS[name].lipschitz, rel=1e-6)
    assert slopes.max().item() <= ACTIVATIONS[name].lipschitz * (1 + 1e-6)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match="expected an activation among relu, tanh, sine, gelu, got 'selu'"):
        activation_named("selu")


def test_a_key_bias_changes_nothing():
    """Which is why `Heads` has none."""
    generator = seeded(1)
    x, heads = normal(generator, N, D), heads_of(generator, 1)
    scores = (x @ heads.query[0] + heads.query_bias[0]) @ (x @ heads.key[0] + normal(generator, K)).mT / math.sqrt(K)
    expected = torch.softmax(scores, dim=-1) @ x @ heads.value[0] + heads.bias
    assert_close(attend(SplitTokens.of(x), heads).tokens, expected, rtol=1e-12, atol=1e-12)


def test_norm_of_equal_features_without_eps_is_nan():
    tokens = SplitTokens(torch.ones(D, dtype=F64), torch.zeros(N, D, dtype=F64))
    assert normalise(tokens, eps=0.0).residual.isnan().all()
    assert (normalise(tokens).residual == 0).all()
