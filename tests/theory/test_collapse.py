"""Dong et al.'s theorems as properties of thousands of random layers, each beside a mutant that must fail."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import oracles
from depthscope.measures import composite_norm
from depthscope.theory import (
    Heads,
    Mlp,
    SplitTokens,
    attend,
    collapse_bound,
    feed_forward,
    layer_contraction,
    lipschitz_bound,
    sharp_constant,
    weight_product,
)
from depthscope.theory.collapse import LARGEST_RANGE, LayerContraction, range_evenness, score_ranges
from samples import seeded

F64 = torch.float64
SHAPES = [(2, 1, 1), (2, 2, 1), (3, 2, 2), (5, 4, 1), (8, 3, 4), (16, 12, 2)]  # n, d, heads
MANY = 500


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=F64)


def weights(generator: torch.Generator, cases: int, d: int, heads: int) -> Heads:
    """From dense to sparse, so that the norms are met by single entries too."""
    query, key, value = (normal(generator, cases, heads, d, d) for _ in range(3))
    sparse = torch.rand(value.shape, generator=generator, dtype=F64) < torch.rand(cases, 1, 1, 1, generator=generator)
    sparse[..., 0, 0] = False
    return Heads(query, key, torch.where(sparse, 0.0, value), query_bias=normal(generator, cases, heads, d))


def layers(seed: int = 0) -> list[tuple[SplitTokens, Heads]]:
    """Random single layers, residuals from 1e-4 to 10, shared tokens from 0 to 100."""
    found = []
    for n, d, heads in SHAPES:
        generator = seeded(seed + 100 * n + d)
        shared = normal(generator, MANY, d) * 10 ** (3 * torch.rand(MANY, 1, generator=generator, dtype=F64) - 1)
        size = 10 ** (5 * torch.rand(MANY, 1, 1, generator=generator, dtype=F64) - 4)
        residual = normal(generator, MANY, n, d) ** 3  # heavy tails: single tokens stand out
        tokens = SplitTokens(shared, size * (residual - residual.mean(dim=-2, keepdim=True)))
        found.append((tokens, weights(generator, MANY, d, heads)))
    return found


@pytest.fixture(scope="module")
def contractions() -> list[LayerContraction]:
    return [layer_contraction(tokens, heads) for tokens, heads in layers()]


def everywhere(contractions: list[LayerContraction], allowed) -> bool:
    """Whether e' ≤ allowed·Σβ_h/√d_qk·e³ in all layers, to rounding."""
    return all(bool((c.constant <= allowed(c) * (1 + 1e-12)).all()) for c in contractions)


def where_it_applies(c: LayerContraction, constant: Tensor | float) -> Tensor:
    return torch.where(c.applies, constant, torch.inf)


# --- one layer ------------------------------------------------------------------------------------


def test_both_sides_of_the_condition_are_tried(contractions: list[LayerContraction]):
    shares = torch.cat([c.applies for c in contractions]).double().mean().item()
    assert 0.2 < shares < 0.8


def test_the_paper_s_bound_holds_where_its_condition_does(contractions: list[LayerContraction]):
    """Thm 2.2 and 2.3: constant 4γ, D ≤ 1.256."""
    assert everywhere(contractions, lambda c: where_it_applies(c, 4 * c.gamma))
    for c in contractions:
        assert (c.after <= c.paper.bound * (1 + 1e-12))[c.applies].all()


def test_the_constant_is_not_a_tenth(contractions: list[LayerContraction]):
    """The mutant: 0.1 in place of 4."""
    assert not everywhere(contractions, lambda c: where_it_applies(c, 0.1 * c.gamma))


def test_the_exponent_is_not_four(contractions: list[LayerContraction]):
    """The mutant: e⁴ in place of e³."""
    assert not everywhere(contractions, lambda c: where_it_applies(c, 4 * c.gamma * c.before))


def test_gamma_may_be_left_out_where_the_condition_holds(contractions: list[LayerContraction]):
    """The paper's first version, constant 4: right by our second argument in `sharp_constant`."""
    assert everywhere(contractions, lambda c: where_it_applies(c, 4.0))


def test_our_constant_needs_no_condition(contractions: list[LayerContraction]):
    assert everywhere(contractions, lambda c: c.sharp)
    for (_, _, heads), c in zip(SHAPES, contractions, strict=True):
        assert heads > 1 or (c.sharp <= c.gamma * (1 + 1e-12)).all()
    assert not everywhere(contractions, lambda c: c.sharp / 4)  # the mutant


def test_the_composite_norm_is_not_a_norm():
    """A column of ones and a row of ones: each has √9 = 3, their sum has 10."""
    column, row = torch.zeros(2, 9, 9, dtype=F64)
    column[:, 0] = row[0] = 1.0
    assert composite_norm(column + row) > composite_norm(column) + composite_norm(row)


def test_unbalanced_heads_are_covered_by_our_sum():
    """Heads whose values are a column and a row: their ratios ‖·‖₁/‖·‖_∞ are d and 1/d."""
    generator = seeded(8)
    d = 32
    value = torch.zeros(2, d, d, dtype=F64)
    value[0, :, 0] = value[1, 0] = 1.0
    for _ in range(50):
        residual = 0.1 * normal(generator, 12, d) ** 3
        tokens = SplitTokens(normal(generator, d), residual - residual.mean(dim=-2, keepdim=True))
        found = layer_contraction(tokens, Heads(*normal(generator, 2, 2, d, 4) / 8, value))
        assert found.constant <= found.sharp


def test_one_half_is_reached_by_two_tokens():
    """Two tokens ±ρ of one feature: e' = √2wρ³ and e = √2ρ, half of γ-free 1 and an eighth of the theorem's 4."""
    one = torch.ones(1, 1, 1, dtype=F64)
    tokens = SplitTokens(torch.zeros(1, dtype=F64), torch.tensor([[1e-3], [-1e-3]], dtype=F64))
    found = layer_contraction(tokens, Heads(one, one, one))
    assert found.constant.item() == pytest.approx(0.5, rel=1e-5)
    assert found.gamma.item() == pytest.approx(math.sqrt(2))


def largest_constant(n: int, d: int, *, around_the_mean: bool) -> float:
    """What gradient ascent finds, from 32 starts."""
    generator = seeded(n + d)
    parts = {"shared": (d,), "residual": (n, d), "query": (1, d, d), "value": (1, d, d)}
    free = {name: normal(generator, 32, *shape).requires_grad_() for name, shape in parts.items()}
    key, largest = torch.eye(d, dtype=F64).expand(32, 1, d, d), 0.0
    optimiser = torch.optim.Adam(free.values(), lr=0.05)
    for _ in range(300):
        residual = free["residual"]
        residual = residual - residual.mean(dim=-2, keepdim=True) if around_the_mean else residual
        tokens = SplitTokens(10 * free["shared"], residual)
        constant = layer_contraction(tokens, Heads(free["query"], key, free["value"])).constant
        largest = max(largest, constant.max().item())
        optimiser.zero_grad()
        (-constant.log().sum()).backward()
        optimiser.step()
    return largest


@pytest.mark.parametrize(("n", "d"), [(2, 2), (3, 2), (5, 4)])
def test_gradient_ascent_finds_no_constant_above_one_half_around_the_mean(n: int, d: int):
    """No theorem: what was found. It comes near, so the search is not idle."""
    assert 0.25 < largest_constant(n, d, around_the_mean=True) <= 0.5 + 1e-9


def test_around_another_centre_the_constant_is_larger():
    """The theorems allow any centre; ours allows 1."""
    assert 0.55 < largest_constant(3, 2, around_the_mean=False) < 1


def tilted_rows(count: int) -> tuple[float, float]:
    """A layer of 2·count + 1 tokens: its residual's lower bound over all centres, and the γ-free bound 4β/√d_qk·e³.

    Token 0 stands alone in feature 0 and has most of q. Each of `count` tokens stands in a feature of its own, where
    only it is asked for, and turns to itself; `count` tokens are the shared one itself and do not turn. R = diag(1, …)
    and zeros, W_QK = M·I, W_V = I: e = 1, β/√d_qk = M. All rows of one kind are equal up to a permutation, so three
    numbers give all: the attention of a turning row to itself and to token 0, and q₀.
    """
    q0, odds = 0.8, 9.0  # of turning to itself
    own = (1 - q0) / count
    strength = math.log(odds / own)
    at_itself, at_zero = own * math.exp(strength), q0
    total = 1 - own + own * math.exp(strength)
    at_itself, at_zero = at_itself / total, at_zero / total
    # Column 0 has q₀ in `count` rows and less in `count` others: its median leaves count·(q₀ − p). Two turning rows
    # differ by p_own in two features: no x is nearer to both than half of it.
    columns, rows = count * (q0 - at_zero), at_itself
    return math.sqrt(columns * rows), 4 * strength


def test_gamma_may_not_be_left_out_without_the_condition():
    residual, bound = tilted_rows(4000)
    assert residual > bound  # n = 8001
    small, enough = tilted_rows(100)
    assert small < enough


def test_the_rows_of_that_example_are_what_attention_gives():
    """At a size that can be computed: 2·20 + 1 tokens."""
    count, q0, odds = 20, 0.8, 9.0
    own = (1 - q0) / count
    strength = math.log(odds / own)
    d = count + 1
    residual = torch.cat([torch.eye(d, dtype=F64), torch.zeros(count, d, dtype=F64)])
    away = 60.0  # the shared tokens' own share of q is e^−60
    bias = torch.full((1, d), math.log(own) + away, dtype=F64)
    bias[0, 0] = math.log(q0) + away
    root = math.sqrt(d)
    heads = Heads(
        strength * root * torch.eye(d, dtype=F64)[None],
        torch.eye(d, dtype=F64)[None],
        torch.eye(d, dtype=F64)[None],
        query_bias=root * bias,
    )
    heads.query[0, 0, 0] = 0.0  # token 0 does not turn
    tokens = SplitTokens(torch.zeros(d, dtype=F64), residual)
    after = attend(tokens, heads).tokens
    column = (after[:, 0] - after[:, 0].median()).abs().sum().item()
    distance = (after[1] - after[2]).abs().sum().item() / 2
    expected, bound = tilted_rows(count)
    assert math.sqrt(column * distance) == pytest.approx(expected, rel=0.02)  # row 0 counts too
    found = layer_contraction(tokens, heads)
    assert 4 * weight_product(heads).item() / root == pytest.approx(bound)
    assert found.before.item() == 1
    assert found.constant <= found.sharp
    assert not found.applies


# --- depth, heads, MLP ----------------------------------------------------------------------------


def deep(exponent: float = 3.0, gain: float = 1.0) -> bool:
    """c^((3^L − 1)/2)·e^(3^L) over up to 4 layers with an MLP, for the largest β, γ and λ of the layers."""
    holds = True
    for n, d, heads in SHAPES:
        generator = seeded(n + d)
        residual = 0.05 * normal(generator, 200, n, d)
        tokens = SplitTokens(normal(generator, 200, d), residual - residual.mean(dim=-2, keepdim=True))
        start = composite_norm(tokens.residual)
        beta = gamma = lipschitz = torch.zeros(200, dtype=F64)
        applies = torch.ones(200, dtype=torch.bool)
        for depth in range(1, 5):
            layer = weights(generator, 200, d, heads)
            mlp = Mlp(normal(generator, 200, d, d), normal(generator, 200, d, d), activation="tanh")
            ranges = score_ranges(tokens, layer)
            applies = applies & (ranges.amax(dim=(-2, -1)) <= LARGEST_RANGE)
            beta = torch.maximum(beta, weight_product(layer))
            gamma = torch.maximum(gamma, range_evenness(ranges).amax(dim=-1).nan_to_num(1.0))
            lipschitz = torch.maximum(lipschitz, lipschitz_bound(mlp))
            tokens = feed_forward(attend(tokens, layer), mlp)
            bound = collapse_bound(
                start, beta=gain * beta, key_width=d, gamma=gamma, heads=heads, lipschitz=lipschitz, layers=depth
            )
            log_bound = bound.log_bound + (exponent**depth - 3.0**depth) * start.log()
            after = composite_norm(tokens.residual)
            holds = holds and bool((after.log() <= log_bound + 1e-9)[applies & (after > 0)].all())
    return holds


def test_the_bound_holds_over_depth_with_heads_and_an_mlp():
    assert deep()


def test_the_bound_over_depth_fails_for_mutants():
    assert not deep(exponent=4.0)
    assert not deep(gain=1e-3)


def test_the_bound_is_the_recursion():
    """c^((3^L − 1)/2)·e^(3^L) is e → c·e³, L times; it contracts below c^(−1/2) and nowhere else."""
    for e in (0.1, 0.3, 0.6):
        value, options = torch.tensor(e, dtype=F64), {"beta": 2.0, "key_width": 4, "gamma": 1.5, "heads": 2}
        for depth in range(1, 4):
            found = collapse_bound(torch.tensor(e, dtype=F64), layers=depth, **options)
            value = found.factor * value**3
            assert_close(found.bound, value)
            assert found.factor.item() == pytest.approx(4 * 1.5 * 2 * 2 / 2)
            assert found.contracts.item() is (e < found.factor.item() ** -0.5)
            assert (found.bound < e).item() is found.contracts.item()
    assert collapse_bound(torch.zeros(1), beta=1.0, key_width=1).bound.item() == 0


def test_a_bound_that_float64_cannot_hold_keeps_its_logarithm():
    found = collapse_bound(torch.tensor(1e-3, dtype=F64), beta=1.0, key_width=1, layers=8)
    assert found.bound.item() == 0
    assert found.log_bound.item() == pytest.approx(3280 * math.log(4) + 6561 * math.log(1e-3))


def test_a_lipschitz_bound_is_not_exceeded():
    generator = seeded(4)
    for activation in ("relu", "tanh", "gelu"):
        mlp = Mlp(normal(generator, 300, 4, 6), normal(generator, 300, 6, 4), activation=activation)
        tokens = SplitTokens(
            normal(generator, 300, 4), 10 ** normal(generator, 300, 1, 1) * normal(generator, 300, 5, 4)
        )
        shared = feed_forward(SplitTokens(tokens.shared, torch.zeros(300, 1, 4, dtype=F64)), mlp).shared
        moved = feed_forward(tokens, mlp).tokens - shared.unsqueeze(-2)
        ratio = composite_norm(moved) / composite_norm(tokens.residual) / lipschitz_bound(mlp)
        assert ratio.max() <= 1
        assert ratio.max() > 0.1  # a tenth of it would be exceeded


# --- the parts ------------------------------------------------------------------------------------


def test_norms_and_ranges_are_the_definitions():
    generator = seeded(3)
    tokens, heads = SplitTokens.of(normal(generator, 6, 4)), weights(generator, 1, 4, 3)
    heads = Heads(*(None if part is None else part[0] for part in heads))
    products = [
        torch.linalg.matrix_norm(q @ k.mT, 1) * oracles.composite_norm(v)
        for q, k, v in zip(heads.query, heads.key, heads.value, strict=True)
    ]
    assert_close(weight_product(heads), torch.stack(products).max())
    e = tokens.residual @ (heads.query[1] @ heads.key[1].mT) @ tokens.residual.mT / 2
    wanted = torch.stack([(e[:, [j]] - e[:, [k]]).squeeze(-1) for j in range(6) for k in range(6)]).abs().amax(dim=0)
    assert_close(score_ranges(tokens, heads)[1], wanted)
    assert_close(range_evenness(wanted), (wanted.sum() / wanted.max()).sqrt())


def test_evenness_is_between_one_and_the_root_of_n():
    assert range_evenness(torch.tensor([0.0, 3.0, 0.0])) == 1
    assert range_evenness(torch.full((9,), 0.1)) == pytest.approx(3)
    assert range_evenness(torch.zeros(4)).isnan()


def test_our_constant_at_its_marks():
    even = torch.ones(10_000, dtype=F64)  # γ = 100: the second argument decides
    marks = {0.0: math.sqrt(2), LARGEST_RANGE: 2.5520, 1.9733: 4.0}
    for largest, wanted in marks.items():
        assert sharp_constant(largest * even).item() == pytest.approx(wanted, abs=2e-3)
    assert sharp_constant(torch.tensor([5.0, 0.0], dtype=F64)) == 1  # one row alone: γ = 1
    assert math.expm1(LARGEST_RANGE) == pytest.approx(2 * LARGEST_RANGE)


def test_equal_tokens_have_no_constant():
    tokens = SplitTokens(torch.ones(3, dtype=F64), torch.zeros(4, 3, dtype=F64))
    found = layer_contraction(tokens, Heads(*(torch.ones(1, 3, 3, dtype=F64) for _ in range(3))))
    assert found.after == 0
    assert found.constant.isnan()
    assert found.gamma.isnan()


def test_a_head_that_tells_no_tokens_apart_leaves_the_bound():
    """Its ranges are all 0: γ is that of the other heads, or nan if there is none."""
    generator = seeded(6)
    tokens, query, key, value = SplitTokens.of(0.3 * normal(generator, 5, 4)), *normal(generator, 3, 3, 4, 4)
    query[1] = 0.0
    found = layer_contraction(tokens, Heads(query, key, value))
    others = layer_contraction(tokens, Heads(*(part[[0, 2]] for part in (query, key, value))))
    assert found.gamma == others.gamma
    assert found.after.item() == pytest.approx(others.after.item())
    assert found.after <= found.paper.bound
    assert found.constant <= found.sharp
    dead = layer_contraction(tokens, Heads(0 * query, key, value))
    assert dead.gamma.isnan()
    assert dead.after == 0
    assert dead.paper.bound == 0


def test_a_bound_over_more_layers_than_float64_can_count():
    """c = 4, threshold ½."""
    e = torch.tensor([0.0, 0.4, 0.5, 0.6], dtype=F64)
    for layers in (646, 647, 700, 10_000):
        found = collapse_bound(e, beta=1.0, key_width=1, layers=layers)
        assert not found.log_bound.isnan().any()
        assert found.bound.tolist() == [0.0, 0.0, 0.5, math.inf]
    kept = collapse_bound(e[1], beta=1.0, key_width=1, layers=600).log_bound.item()
    assert kept == pytest.approx(3.0**600 * math.log(0.4 / 0.5))


def test_a_bound_without_layers_is_the_residual():
    e = torch.tensor([0.0, 0.3, 2.0], dtype=F64)
    for beta in (0.0, 1.0):
        assert_close(collapse_bound(e, beta=beta, key_width=1, layers=0).bound, e)
    found = collapse_bound(e, beta=0.0, key_width=1, layers=2)
    assert found.bound.tolist() == [0.0, 0.0, 0.0]
    assert found.contracts.all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": -1}, "expected layers to be a whole number of 0 or more, got -1"),
        ({"layers": 2.5}, "expected layers to be a whole number of 0 or more, got 2.5"),
        ({"key_width": 0}, "expected key_width to be a whole number of 1 or more, got 0"),
        ({"heads": 0}, "expected heads to be a whole number of 1 or more, got 0"),
        ({"beta": -1.0}, "expected a bound on norms of weights, 0 or more, got a factor c = -4"),
    ],
)
def test_a_bound_of_what_cannot_be_is_refused(options: dict, said: str):
    with pytest.raises(ValueError, match=said):
        collapse_bound(torch.ones(1), **{"beta": 1.0, "key_width": 1, **options})
