"""The closed forms of both exponents: against simulated blocks, with mutants; and what is prescribed from them."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import depthscope
from depthscope.measures import token_similarity
from depthscope.models import BlockConfig, Encoder
from depthscope.models.initialisers import HE, XAVIER, Scheme, draw_block, pytorch_default
from depthscope.remedies import DeEscalate, ResidualWeight, recommend
from depthscope.theory import (
    Gains,
    OddsMap,
    course,
    prescribe,
)
from depthscope.theory.mean_field import relu_kernel, relu_slope
from exponents import gradient_exponents, token_exponents
from samples import seeded

N, WIDTH, FFN, DEPTH = 32, 128, 256, 24
HE_GAINS = Gains(attention=1.0, ffn=2.0, score=1.0, tokens=N)
CASES = [  # a collapse, both sides of τ_c, complete de-escalation, weak branches
    ("post", 1.0, 0.0),
    ("post", 1.0, 0.5),
    ("post", 1.0, 1.0),
    ("post", 0.4, 0.3),
    ("pre", 1.0, 0.0),
    ("pre", 0.5, 1.0),
]


def he(attention, ffn, generator=None):
    draw_block(Scheme(XAVIER, XAVIER, XAVIER, HE), attention, ffn, generator)


def stack(initialise, placement: str, alpha: float, tau: float, seed: int):
    """Blocks with α on both branches and τ at their ends, as functions."""
    block = BlockConfig(WIDTH, 4, FFN, alpha=alpha, placement=placement, initialise=initialise)
    encoder = Encoder(DEPTH, block, generator=seeded(seed))

    def made(one):
        one.stations["ffn_branch"].register_forward_hook(lambda _m, _i, branch: alpha * branch)

        def run(x):
            y = one(x)
            return y - tau * y.mean(dim=-2, keepdim=True)

        return run

    return [made(one) for one in encoder.blocks]


@pytest.fixture(scope="module")
def simulated():
    """Case → mean λ_g per block and t_sim at the end, over two draws of the weights."""
    found = {}
    for case in CASES:
        growth, similarity = [], []
        for seed in (0, 1):
            blocks = stack(he, *case, seed)
            x = torch.randn(1, N, WIDTH, generator=seeded(seed + 10))
            growth.append(sum(gradient_exponents(blocks, x, generator=seeded(seed))) / DEPTH)
            with torch.no_grad():
                for block in blocks:
                    x = block(x)
            similarity.append(token_similarity(x).item())
        found[case] = sum(growth) / 2, sum(similarity) / 2
    return found


def check(simulated, gains: Gains) -> None:
    """λ_g to 0.012 per block (two draws of this width scatter by 0.005) and t_sim to 0.08 (`band` allows more)."""
    for (placement, alpha, tau), (growth, similarity) in simulated.items():
        expected = course(DEPTH, alpha, tau, gains, placement=placement)
        assert expected.growth / DEPTH == pytest.approx(growth, abs=0.012), (placement, alpha, tau)
        assert expected.similarity[-1] == pytest.approx(similarity, abs=0.08), (placement, alpha, tau)


def test_both_are_what_simulated_blocks_do(simulated):
    check(simulated, HE_GAINS)


def test_mutants_are_not_what_simulated_blocks_do(simulated, monkeypatch):
    with pytest.raises(AssertionError):
        check(simulated, replace(HE_GAINS, ffn=1.0))  # ReLU's half counted twice
    with pytest.raises(AssertionError):
        check(simulated, replace(HE_GAINS, score=0.0))  # gradients through queries and keys forgotten
    monkeypatch.setattr("depthscope.theory.mean_field.relu_kernel", lambda gap: gap)  # ReLU's mean forgotten
    with pytest.raises(AssertionError):
        check(simulated, HE_GAINS)


def test_the_exponent_of_tokens_is_that_of_the_odds():
    gains = Gains.of_linear(WIDTH, FFN, N)
    x = torch.randn(2, N, WIDTH, generator=seeded(3))
    for tau in (0.0, 0.3):
        found = token_exponents(stack(pytorch_default, "post", 1.0, tau, 0)[:8], x, generator=seeded(4))
        expected = -0.5 * math.log((1 - tau) ** 2 * gains.odds_map().rho)
        # τ makes the tokens smaller before attention reads them, which biases then outweigh: a little more order.
        assert sum(found) / len(found) == pytest.approx(expected, abs=0.03)


def test_a_narrow_model_does_not_look_ordered():
    """Differences that have come through a norm are not among those that the next one takes out; fresh ones are.

    1/d of their energy along the mean and 1/d along the features' mean: 0.03 of the exponent at this width.
    """
    encoder = Encoder(40, BlockConfig(32, 2, 64, initialise=he), generator=seeded(0))
    depthscope.apply(encoder, ResidualWeight(0.1), DeEscalate(0.1))
    x = torch.randn(4, 5, 32, generator=seeded(7))
    expected = sum(course(40, 0.1, 0.1, replace(HE_GAINS, tokens=5)).tokens) / 40
    blocks = list(encoder.blocks)
    assert sum(token_exponents(blocks, x, generator=seeded(8))) / 40 == pytest.approx(expected, abs=0.01)
    anew = [token_exponents([block], x, generator=seeded(8))[0] for block in blocks]
    assert sum(anew) / 40 < expected - 0.015


def test_the_exponent_of_tokens_in_closed_form():
    for tau in (0.0, 0.4, 0.99):
        expected = -0.5 * math.log((1 - tau) ** 2 * HE_GAINS.odds_map(0.7).rho)
        assert course(3, 0.7, tau, HE_GAINS).tokens == pytest.approx([expected] * 3, abs=1e-5)
    assert course(3, 1.0, 1.0, HE_GAINS).tokens == (math.inf,) * 3  # no mean is left, nothing can collapse
    pre = course(200, 1.0, 0.0, HE_GAINS, placement="pre")
    assert pre.tokens[0] < 4 * pre.tokens[100] < 0  # like 1/l: the trunk grows
    # The same number from the odds of a course that is in its collapse.
    deep = course(200, 1.0, 0.0, HE_GAINS, similarity=0.999)
    assert -0.5 * math.log(deep.odds[40] / deep.odds[39]) == pytest.approx(deep.tokens[40], abs=1e-3)


def test_limits_that_can_be_written_down():
    many = Gains(attention=1.0, ffn=2.0, score=0.0, tokens=10**9)
    complete = course(50, 1.0, 1.0, many)
    assert complete.gradient[10] == pytest.approx(-0.5 * math.log(1 - 2 / 3 / math.pi), abs=1e-6)
    assert complete.similarity[-1] == 0
    collapsed = course(200, 1.0, 0.0, many, similarity=0.5)
    assert collapsed.odds[-1] / collapsed.odds[-2] == pytest.approx(2, rel=1e-3)  # ρ = 1 + A
    assert collapsed.gradient[20] == pytest.approx(0, abs=1e-3)  # the gradient of one token neither grows nor shrinks
    pre = [course(depth, 1.0, 0.0, many, placement="pre", similarity=0.5).odds[-1] for depth in (400, 800)]
    assert math.log2(pre[1] / pre[0]) == pytest.approx(1 / 3, abs=0.05)  # a power of depth, A/(A + a)


@given(st.floats(1e-3, 1.99))
def test_the_kernel_of_relu_and_its_slope(gap: float):
    c = 1 - gap
    assert relu_kernel(gap) == pytest.approx(
        1 - (math.sqrt(1 - c * c) + c * (math.pi - math.acos(c))) / math.pi, abs=1e-9
    )
    assert relu_slope(gap) == pytest.approx(1 - math.acos(c) / math.pi, abs=1e-7)


def test_the_kernel_is_right_in_the_collapse():
    # θ = √(2·gap): 1 − κ = gap − θ³/(3π) + …
    assert relu_kernel(1e-20) == pytest.approx(1e-20 - (2e-20) ** 1.5 / (3 * math.pi), rel=1e-12)
    assert relu_kernel(1e-4 * 0.999) == pytest.approx(relu_kernel(1e-4), rel=2e-3)  # no step between the two forms
    assert relu_kernel(1.0) == pytest.approx(1 - 1 / math.pi)


@settings(deadline=None, max_examples=12)
@given(st.integers(2, 100), st.sampled_from(["post", "pre"]), st.floats(0.1, 2), st.floats(0.05, 2))
def test_what_is_prescribed_keeps_both(depth: int, placement, attention: float, ffn: float):
    gains = Gains(attention, ffn, attention, tokens=32)
    found = prescribe(depth, gains, placement=placement)
    alpha, tau = found
    assert 0 < alpha <= 1
    assert 0 <= tau < 1
    assert abs(math.log(found.growth)) <= math.log(10) * (1 + 1e-6)
    assert found.similarity <= 0.12  # the odds map's fixed point is exact for the map, not for the kernel's bend
    assert found.alpha >= prescribe(4 * depth, gains, placement=placement).alpha


def test_a_thousand_blocks_need_a_branch_weight_like_one_over_the_root_of_depth():
    at = {depth: prescribe(depth, HE_GAINS).alpha for depth in (250, 1000)}
    assert at[250] / at[1000] == pytest.approx(2, rel=0.05)
    assert at[1000] < 0.1


def test_the_recommender_measures_what_is_prescribed():
    """On fresh blocks: τ to 8 %; α of both keeps the gradient within a factor of 10, by the closed form.

    c to 15 %: what attention itself feeds into the mean (unequal column sums, ω) is not in the closed form.
    """
    encoder = Encoder(24, BlockConfig(WIDTH, 4, FFN, initialise=he), generator=seeded(0))
    tokens = torch.randn(1, N, WIDTH, generator=seeded(1))
    measured = recommend(encoder, tokens)
    written = prescribe(24, HE_GAINS, level=measured.level)
    assert measured.odds.rho == pytest.approx(HE_GAINS.odds_map().rho, rel=0.1)
    assert measured.odds.feed == pytest.approx(HE_GAINS.odds_map().feed, rel=0.15)
    assert measured.tau == pytest.approx(written.tau, rel=0.08)
    for alpha in (measured.alpha, written.alpha):
        assert abs(course(24, alpha, written.tau, HE_GAINS).growth) < math.log(10)
    asked = prescribe(24, Gains.of_odds(measured.odds, N), level=measured.level)
    assert list(measured.growth)[1] == float(f"{asked.alpha:.2g}")  # the first that is tried after 1


@settings(deadline=None, max_examples=20)
@given(st.floats(1, 4), st.floats(0, 0.4), st.integers(8, 500))
def test_gains_of_an_odds_map_have_that_map(rho: float, feed: float, tokens: int):
    found = Gains.of_odds(OddsMap(rho, feed), tokens).odds_map()
    assert found.rho == pytest.approx(rho)
    assert found.feed == pytest.approx(feed, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(
    ("rho", "feed", "tokens"), [(0.9, 0.1, 8), (2, -0.1, 8), (2, 0.6, 64), (math.nan, 0.1, 8), (2, 0.1, 1)]
)
def test_an_odds_map_that_no_such_block_has_is_refused(rho: float, feed: float, tokens: int):
    with pytest.raises(ValueError, match="expected"):
        Gains.of_odds(OddsMap(rho, feed), tokens)


def test_in_pre_norm_too_both_hold_the_level_behind_the_last_block():
    """τ to 15 %: half of what the level of the first blocks, which is three times as high, would ask for."""
    encoder = Encoder(24, BlockConfig(64, 4, 128, initialise=he, placement="pre"), generator=seeded(0))
    measured = recommend(encoder, torch.randn(2, N, 64, generator=seeded(1)), weigh_branches=False)
    written = prescribe(24, HE_GAINS, level=measured.level, placement="pre")
    assert measured.tau == pytest.approx(written.tau, rel=0.15)
    assert course(24, 1.0, written.tau, HE_GAINS, placement="pre").similarity[-1] == pytest.approx(measured.level)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="τ in"):
        course(3, 1.0, 1.5)
    with pytest.raises(ValueError, match="a level in"):
        prescribe(10, level=1.0)
    with pytest.raises(ValueError, match="one of post, pre, got 'post-norm'"):
        prescribe(10, placement="post-norm")
    with pytest.raises(ValueError, match="energy above 0, got 0"):
        prescribe(10, energy=0)
    with pytest.raises(ValueError, match="no α above 0 keeps the gradient's growth over 100 blocks"):
        prescribe(100, placement="pre", growth=1.0001)  # τ alone takes more from a random gradient's mean


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_a_number_that_is_none_is_refused_and_not_computed_with(placement):
    for wrong in (-1.0, math.nan, math.inf):
        for name in ("attention", "ffn", "score", "attention_bias", "ffn_bias"):
            with pytest.raises(ValueError, match=f"expected {name}, an energy"):
                Gains(**{name: wrong})
        with pytest.raises(ValueError, match=r"similarity in \[0, 1\]"):
            course(3, similarity=wrong, placement=placement)
        with pytest.raises(ValueError, match="finite α ≥ 0"):
            course(3, wrong, placement=placement)
    for tokens in (0, 2.5, math.nan):
        with pytest.raises(ValueError, match="whole number of tokens"):
            Gains(tokens=tokens)
    with pytest.raises(ValueError, match="whole depth"):
        course(2.5, placement=placement)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_one_token_and_equal_tokens(placement):
    """A single token has no differences: it is its mean, and neither exponent of it needs a remedy."""
    found = course(3, 1.0, 0.0, Gains(tokens=1), placement=placement)
    assert found.similarity == (1.0,) * 3
    assert all(map(math.isnan, found.tokens))
    if placement == "post":  # the gradient of one token neither grows nor shrinks
        assert found.growth == pytest.approx(0, abs=1e-12)
    assert prescribe(30, Gains(tokens=1), placement=placement).tau == 0
    with pytest.raises(ValueError, match="a single token has no odds"):
        Gains(tokens=1).odds_map()
    for gains, similarity in ((Gains(tokens=1), None), (Gains(), 1.0)):
        with pytest.raises(ValueError, match="τ = 1 leaves nothing of tokens that are all equal"):
            course(3, 1.0, 1.0, gains, placement=placement, similarity=similarity)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_attention_that_singles_tokens_out_is_refused(placement):
    """At s = 4, 16 tokens, blocks of width 384 let the gradient grow by e^0.2 a block; the formulas would say e^0.7."""
    sharp = Gains(1.0, 0.5, 4.0, tokens=16)
    with pytest.raises(ValueError, match=r"scores of variance 3\.\d+ among 16 tokens single some out"):
        course(12, 1.0, 0.4, sharp, placement=placement)
    with pytest.raises(ValueError, match="expected nearly uniform attention"):
        prescribe(12, sharp, placement=placement)
    assert course(12, 1.0, 0.4, replace(sharp, tokens=64), placement=placement).growth > 0
