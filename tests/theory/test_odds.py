"""The odds map: algebra, fixed points, critical strength, the causal case, pre-norm; and simulations of it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from depthscope.measures import delta, second_eigenvalue, token_similarity
from depthscope.models import Block, BlockConfig, theorem
from depthscope.remedies import deescalate
from depthscope.theory import (
    OddsMap,
    band,
    causal_ramp,
    causal_ratio,
    measure_map,
    odds_of,
    pre_norm_exponent,
    pre_norm_odds,
    similarity_of,
    token_odds,
    uniform_causal_attention,
)
from depthscope.theory.odds import WALK
from samples import seeded

maps = st.builds(OddsMap, rho=st.floats(1.01, 4), feed=st.floats(0.001, 2))


@given(maps, st.floats(0, 5), st.floats(0, 1), st.integers(0, 12))
def test_the_closed_form_is_the_iteration(step: OddsMap, start: float, tau: float, blocks: int):
    s = start
    for _ in range(blocks):
        s = (1 - tau) ** 2 * (step.rho * s + step.feed)
    assert step.after(start, blocks, tau) == pytest.approx(s, rel=1e-9, abs=1e-12)


def check_threshold(step: OddsMap, critical: float) -> None:
    """Just above it the odds settle at the fixed point, just below they grow without end."""
    above, below = min(critical + 0.02, 1.0), max(critical - 0.02, 0.0)
    limit = step.fixed_point(above)
    assert math.isfinite(limit)
    assert step.after(1.0, 5000, above) == pytest.approx(limit, rel=1e-6)
    if critical > 0.02:
        assert math.isinf(step.fixed_point(below))
        assert step.after(1.0, 2000, below) > 1e6


@given(maps)
def test_critical_strength(step: OddsMap):
    check_threshold(step, step.critical_tau)


def test_critical_strength_fails_for_a_mutant():
    step = OddsMap(2, 0.1)
    assert step.critical_tau == pytest.approx(0.2929, abs=1e-4)
    with pytest.raises(AssertionError):
        check_threshold(step, 1 - 1 / step.rho)  # the square root forgotten
    assert OddsMap(0.9, 0.1).critical_tau == 0


@given(maps, st.floats(0.001, 10))
def test_tau_for_a_wanted_level(step: OddsMap, wanted: float):
    tau = step.tau_for(wanted)
    assert step.critical_tau < tau < 1
    assert step.fixed_point(tau) == pytest.approx(wanted, rel=1e-6)


def test_tau_for_nothing_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        OddsMap(2, 0.1).tau_for(0)


@given(maps, st.floats(0.01, 0.5), st.floats(0.6, 0.999))
def test_depth_to_a_threshold(step: OddsMap, start: float, threshold: float):
    depth = step.depth_to(threshold, odds_of(start))
    assert depth is not None
    assert similarity_of(step.after(odds_of(start), depth)) > threshold - 1e-12
    assert similarity_of(step.after(odds_of(start), depth - 1)) <= threshold + 1e-12
    assert step.depth_to(threshold, odds_of(threshold) * 2) == 0
    assert OddsMap(2, 0.1).depth_to(0.9, 0.1, tau=0.9) is None


def test_odds_and_similarity_are_inverse_and_right_in_the_limits():
    for t in (0.0, 1e-12, 0.3, 1 - 1e-12):
        assert similarity_of(odds_of(t)) == pytest.approx(t, rel=1e-3, abs=1e-15)
    assert similarity_of(odds_of(1.0)) == 1
    x = torch.ones(5, 3, dtype=torch.float64)
    assert token_odds(x).isinf()
    x[0, 0] += 1e-12
    assert token_odds(x) > 1e22


def test_the_map_of_a_block_predicts_where_similarity_goes():
    """Measured on fresh blocks, the map predicts others: collapse at τ = 0 and 0.1, a level at τ = 0.6."""
    config = BlockConfig(128, 4, output_projection=False, scale="width", initialise=theorem)
    x = torch.randn(16, 32, 128, generator=seeded(0))
    with torch.no_grad():
        measured = [measure_map(Block(config, seeded(100 + k)), x) for k in range(8)]
        step = OddsMap(
            math.exp(sum(math.log(a.rho) for a in measured) / 8), math.exp(sum(math.log(a.feed) for a in measured) / 8)
        )
        assert step.rho == pytest.approx(2, rel=0.15)
        assert step.critical_tau == pytest.approx(0.293, abs=0.04)
        for tau, low, high in ((0.0, 0.999, 1.0), (0.1, 0.99, 1.0), (0.6, 0.0, 0.3)):
            y = x
            for block in range(24):
                y = deescalate(Block(config, seeded(block))(y), tau)
            found = token_similarity(y).mean().item()
            assert low <= found <= high
            if tau == 0.6:
                assert odds_of(found) == pytest.approx(step.fixed_point(tau), rel=0.35)
    naive = OddsMap(rho=step.rho + step.feed / 0.05, feed=0)  # the mutant: ξ₁/ξ₂ taken for ρ
    assert naive.critical_tau > 0.35


def test_band_contains_the_walk_of_the_log_odds():
    low, high = band(0.5, blocks=20, width=128)
    assert low < 0.5 < high
    assert band(0.5, 0, 128) == (0.5, 0.5)
    assert band(1.0, 20, 128) == (1.0, 1.0)
    wider = band(0.5, blocks=80, width=128)
    assert wider[0] < low
    assert high < wider[1]


def test_the_log_odds_walk_as_the_band_says():
    """Variance over fresh weights, per block and times the width; 40 trials know a variance to 22 %."""
    d, blocks, trials = 64, 6, 40
    config = BlockConfig(d, 4, output_projection=False, scale="width", initialise=theorem)
    x = torch.randn(1, 24, d, generator=seeded(0)) + torch.randn(1, 1, d, generator=seeded(1))
    ends = []
    with torch.no_grad():
        for trial in range(trials):
            generator, y = seeded(100 + trial), x
            for _ in range(blocks):
                y = Block(config, generator)(y)
            ends.append(token_odds(y).log().item())
    found = torch.tensor(ends).var().item() * d / blocks
    assert WALK * (1 - 0.66) < found < WALK * (1 + 0.66)  # three standard errors


# --- the causal case ------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 5, 64])
def test_the_ramp_is_the_second_eigenvector(n: int):
    p, ramp = uniform_causal_attention(n), causal_ramp(n)
    assert_close(p @ ramp, ramp / 2, rtol=0, atol=1e-15)
    assert second_eigenvalue(p) == 0.5
    wrong = torch.arange(1, n + 1, dtype=torch.float64)  # the mutant: a ramp that starts at 1
    assert (p @ wrong - wrong / 2).abs().max() > 0.1


def test_causal_attention_collapses_onto_the_first_token_at_rate_0625():
    """In the end |x_i − x_1|²/|x_1|² shrinks by (1 + ¼)/(1 + 1) per block, and what is left is the ramp.

    The differences to the first token are carried on their own (P1 = 1 makes that exact), so that 200
    blocks do not drown in rounding; the eigenvectors of P are far from orthogonal and the other modes
    fade slowly, so the first 100 blocks do not count.
    """
    n, d, trials, blocks = 16, 128, 16, 200
    first = torch.randn(trials, 1, d, generator=seeded(0), dtype=torch.float64)
    left = torch.randn(trials, n, d, generator=seeded(1), dtype=torch.float64)
    left[:, 0] = 0
    p = uniform_causal_attention(n)
    logs = torch.zeros(blocks, dtype=torch.float64)
    for block in range(blocks):
        w = torch.randn(trials, d, d, generator=seeded(block + 2), dtype=torch.float64) / math.sqrt(d)
        before = left.square().sum(dim=(1, 2)) / first.square().sum(dim=(1, 2))
        first, left = first + first @ w, left + p @ left @ w
        logs[block] = (left.square().sum(dim=(1, 2)) / first.square().sum(dim=(1, 2)) / before).log().mean()
        first, left = first / first.norm(dim=-1, keepdim=True), left / torch.linalg.matrix_norm(left, keepdim=True)
    found = logs[100:].mean().exp().item()
    assert found == pytest.approx(1 / causal_ratio(), rel=0.02)
    assert causal_ratio() == 1.6
    assert found > 0.6  # and not ½, the bidirectional rate
    shape = torch.linalg.svd(left[0]).U[:, 0].abs()
    assert_close(shape, causal_ramp(n), rtol=0, atol=1e-4)


def test_the_theorem_does_not_apply_to_causal_attention():
    assert [bool(delta(uniform_causal_attention(n)) < 1) for n in (2, 16, 17, 64)] == [True, True, False, False]
    assert delta(uniform_causal_attention(64)).item() == pytest.approx(1.24, abs=0.01)
    assert delta(uniform_causal_attention(1024)).item() == pytest.approx(1.55, abs=0.01)


# --- pre-norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ffn", [0.0, 0.5, 1.0])
def test_pre_norm_odds_grow_like_a_power_of_depth(ffn: float):
    found = pre_norm_odds(1.0, 40_000, ffn=ffn)
    slope = math.log(found[40_000] / found[10_000]) / math.log(4)
    assert slope == pytest.approx(pre_norm_exponent(ffn=ffn), rel=0.05)
    assert found[20] < OddsMap(2, 0).after(1.0, 20)  # far below post-norm's exponential
