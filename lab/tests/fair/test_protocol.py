"""Rates, seeds, baselines, and what is said to be separated."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from depthscope.models import BlockConfig
from depthscope_lab.fair import Facts, Plan, Reader, Table, budgets_of, compare, holm, losses_of, protocol, standings
from depthscope_lab.fair.separation import paired_difference

FACTS = Facts(30, samples=15)


def build(seed: int):
    return Reader(1, BlockConfig(8, 2, 16), FACTS.tokens, seed)


def test_a_paired_difference_is_students():
    drawn = np.random.default_rng(0).normal(size=(2, 8))
    a, b = ({seed: float(value) for seed, value in enumerate(row)} for row in drawn)
    found, expected = paired_difference(a, b), stats.ttest_rel(*drawn)
    assert found.p == pytest.approx(expected.pvalue, rel=1e-12)
    assert found.seeds == 8
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high), rel=1e-12)


def test_pairs_are_by_seed_and_the_degenerate_are_said():
    assert paired_difference({1: 1.0, 2: 2.0, 3: 9.0}, {2: 1.0, 1: 0.0}).mean == 1
    assert paired_difference({1: 1.0, 2: 2.0}, {1: 0.5, 2: 1.5}).p == 0
    assert paired_difference({1: 1.0, 2: 2.0}, {1: 1.0, 2: 2.0}).p == 1
    for one in ({1: 1.0}, {1: math.inf, 2: 1.0}):
        found = paired_difference(one, {1: 0.0, 2: 0.0})
        assert found.p == 1
        assert math.isnan(found.low)


def test_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # by hand
    assert holm([]) == []
    assert holm([0.9, 0.8]) == [1, 1]


def test_equal_variants_are_hardly_ever_separated():
    """Six variants of one distribution, far better than the baseline: a false "worse" in at most 5 % of pages."""
    random, said = np.random.default_rng(1), 0
    for _ in range(300):
        rows = {str(number): dict(enumerate(random.normal(size=8))) for number in range(6)}
        found = standings({**rows, "flat": dict.fromkeys(range(8), 100.0)}, ["flat"])
        said += any(one.standing == "worse" for one in found)
    assert said <= 0.25 * 300  # the best is chosen by the same losses: less than 5 independent tests at .05


def test_standings():
    def about(mean: float, spread: float = 0.01):
        return {seed: mean + spread * (-1) ** seed * seed for seed in range(1, 9)}

    found = standings(
        {
            "best": about(1.0),
            "near": {seed: loss + 0.001 * (-1) ** (seed // 2) for seed, loss in about(1.0).items()},
            "worse": about(1.5, 0.02),
            "unlearned": about(3.0, 0.1),
            "dead": {**about(1.0), 3: math.inf},
            "linear": about(3.0),
            "two": about(3.2),
        },
        ["linear", "two"],
    )
    said = {one.variant: one.standing for one in found}
    assert {said.pop("best"), said.pop("near")} == {"best", "not separated"}
    assert said == {
        **dict.fromkeys(("linear", "two"), "baseline"),
        "worse": "worse",
        "unlearned": "not learned",
        "dead": "died",
    }
    with pytest.raises(ValueError, match="baseline"):
        standings({"a": about(1.0)}, [])


def test_budgets_are_a_factor_of_four_apart():
    assert [budget.steps for budget in budgets_of(1600)] == [100, 400, 1600]


def test_a_comparison_is_kept_run_by_run(tmp_path: Path, monkeypatch):
    plan = Plan(rates=(1e-3, 3e-3, 1e-2), more=1, fresh=(1, 2), compile=False)
    variants = {"one": build, "linear": lambda _: Table(FACTS.tokens)}
    told: list[str] = []
    found = compare(FACTS, variants, budgets_of(8, 2), tmp_path, plan, told.append)
    assert len(found) == 2 * 2 * 2
    assert {one.steps for one in found} == {2, 8}
    assert all(set(losses) == {1, 2} for losses in losses_of(found, 8).values())
    assert not list(tmp_path.glob("*.safetensors"))
    monkeypatch.setattr(protocol, "Together", None)  # nothing is trained again
    assert compare(FACTS, variants, budgets_of(8, 2), tmp_path, plan) == found
    assert told


def test_a_killed_comparison_goes_on(tmp_path: Path):
    plan = Plan(rates=(1e-3, 3e-3), more=0, fresh=(1, 2), compile=False)

    def stop(text: str) -> None:
        if "2 members" in text:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(FACTS, {"one": build}, budgets_of(8, 1), tmp_path, plan, stop)
    told: list[str] = []
    found = compare(FACTS, {"one": build}, budgets_of(8, 1), tmp_path, plan, told.append)
    assert told == ["one, 8 steps: 2 members"]  # the tuning seeds were not trained again
    assert [one.rate for one in found] == [found[0].rate] * 2
    assert found[0].edge


def test_what_tunes_is_not_judged():
    with pytest.raises(ValueError, match="tuning seeds"):
        Plan(tuning=(1, 2))
