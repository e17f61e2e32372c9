"""The fitted odds map, the depth at which it arrives, the steps that make it, and words."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthscope.diagnosis import diagnose
from depthscope.diagnosis.steps import log_odds, step_growth
from depthscope.diagnosis.trend import FEWEST_PAIRS, fit_trend
from depthscope.models import BlockConfig, Encoder, pre_norm, xavier
from depthscope.naming import ranges
from depthscope.probing import probe
from depthscope.theory import OddsMap, odds_of
from depthscope.theory.odds import WALK
from profiles_made_up import by_map, made_up
from samples import seeded


def logs(similarity: list[float]) -> list[float]:
    return [math.log(odds_of(value)) for value in similarity]


@settings(max_examples=40, deadline=None)
@given(st.floats(1.05, 2.5), st.floats(0.01, 0.3), st.floats(0.01, 0.45))
def test_an_exact_map_is_found(rho: float, feed: float, start: float):
    depth = OddsMap(rho, feed).depth_to(0.97, odds_of(start))
    assert depth is not None
    trend = fit_trend(logs(by_map(rho, feed, start, max(depth, 8))))
    # ρ and c in turn shrink the error by s_small/s_large a round; a grid of 81 candidates is 6 % apart.
    assert trend.map.rho == pytest.approx(rho, rel=0.03)
    assert trend.error < 0.03


def walk(width: int, depth: int, seed: int) -> list[float]:
    """Log-odds of a map with ρ = 2 and c = 0.1 and the noise of random blocks."""
    noise = np.random.default_rng(seed).normal(scale=math.sqrt(WALK / width), size=depth)
    odds = [0.02]
    for step in noise:
        odds.append((2 * odds[-1] + 0.1) * math.exp(step))
    return [math.log(s) for s in odds]


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_one_odd_block_do_not_decide(seed: int):
    values = walk(128, 20, seed)
    spread = 2 * math.sqrt(WALK / 128 / 15) * math.sqrt(math.pi / 2)  # two deviations of a median of ~15 pairs
    assert math.log(fit_trend(values).map.rho / 2) == pytest.approx(0, abs=spread)
    odd = [*values[:12], *(value + 3 for value in values[12:])]  # one block multiplies the odds by 20
    assert math.log(fit_trend(odd).map.rho / 2) == pytest.approx(0, abs=1.5 * spread)


def test_what_diversity_feeds_is_right_on_average():
    """c of one profile rests on the few pairs with s < 1; over 200 of them its median is c."""
    found = [fit_trend(walk(128, 20, seed)).map.feed for seed in range(200)]
    # One c scatters by 11 % of the s' ≈ 0.6 in the middle of the small pairs; three deviations of a median of 200.
    assert np.median(found) == pytest.approx(0.1, abs=3 * 1.25 * 0.11 * 0.6 / math.sqrt(200))


def test_arrival():
    similarity = by_map(1.1, 0.02, 0.3, 12)
    trend = fit_trend(logs(similarity))
    true = 12 + OddsMap(1.1, 0.02).depth_to(0.99, odds_of(similarity[-1]))
    best, low, high = trend.block_of(0.99, odds_of(similarity[-1]), 12)
    assert low <= best <= high
    assert abs(best - true) <= 2
    level = fit_trend(logs(by_map(0.5, 0.2, 0.1, 12)))
    assert level.block_of(0.99, 0.4, 12)[0] is None


def test_where_blocks_scatter_the_arrival_is_a_range():
    values = walk(32, 7, seed=1)
    best, low, high = fit_trend(values).block_of(0.99, math.exp(values[-1]), 7)
    assert 7 < low < high
    assert low <= best <= high


def test_too_few_pairs_have_no_trend():
    assert fit_trend([0.1] * FEWEST_PAIRS) is None
    assert fit_trend([0.1] * (FEWEST_PAIRS + 1)) is not None
    nan = math.nan
    assert fit_trend([0.1, nan, 0.1, nan, 0.1, nan, 0.1]) is None


def test_rounding_is_not_read():
    """Tokens that differ by no more than their format can hold have odds that mean nothing."""
    similarity = [0.5, 0.999, 1.0, 1.0]
    curves = {"token_similarity": similarity, "token_diversity": [0.5, 1e-3, 1e-9, 1e-14]}
    assert np.isfinite(log_odds(made_up(curves))).tolist() == [True, True, True, False]
    assert np.isfinite(log_odds(made_up(curves, dtype="bfloat16"))).tolist() == [True, True, False, False]
    assert np.isfinite(log_odds(made_up(curves, dtype="float64"))).tolist() == [True] * 4


@pytest.mark.parametrize("options", [{}, {"placement": pre_norm}])
def test_the_steps_add_up_to_the_whole(options):
    import torch

    model = Encoder(4, BlockConfig(32, 4, initialise=xavier, **options), generator=seeded(0))
    profile = probe(model, torch.randn(2, 16, 32, generator=seeded(1)), stations="trunk")
    growth = step_growth(profile, "token_similarity", ("", 0, 4))
    whole = log_odds(profile)
    assert sum(growth.values()) == pytest.approx(whole[4] - whole[0])
    assert set(growth) == ({"attention", "FFN"} if options else {"attention", "norm", "FFN"})
    outputs = probe(model, torch.randn(2, 16, 32, generator=seeded(1)), stations="output")
    assert step_growth(outputs, "token_similarity", ("", 0, 4)) is None


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        ([0.1, 0.91, 0.95, 0.999], "passes 0.9 after block 1 and 0.99 after block 3."),
        ([0.1, 0.5, 0.4], None),
        ([0.1, 0.95, 0.4], "passes 0.9 after block 1, and comes back to 0.400 after block 2."),
        ([0.1, 0.995, 0.999], "passes 0.9 after block 1 and 0.99 after block 1: 1 of 2 blocks work on tokens that are"),
    ],
)
def test_crossing(curve: list[float], said: str | None):
    found = diagnose(made_up({"token_similarity": curve})).finding("crossing")
    assert (found is None) == (said is None)
    assert found is None or f"Token similarity {said}" in found.sentence


def test_ranges():
    assert ranges([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
    assert ranges([4]) == "4"


def test_a_probe_without_options_is_enough_for_a_verdict():
    """The command line and Python take the same: nothing is said to be missing."""
    import torch

    import depthscope

    model = Encoder(12, BlockConfig(32, 4, initialise=xavier), generator=seeded(0))
    rules = [
        finding.rule
        for finding in depthscope.diagnose(probe(model, torch.randn(4, 16, 32, generator=seeded(1)))).findings
    ]
    assert "steps" in rules
    assert "not measured" not in rules
