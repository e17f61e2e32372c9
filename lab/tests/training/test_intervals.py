"""The bootstrap over seeds: against all resamples written out, in its corners."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from depthscope_lab.training.intervals import bootstrap_interval, overlap


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=5), st.sampled_from([0.5, 0.9, 0.95]))
def test_it_is_what_all_resamples_give(values: list[float], confidence: float):
    means = sorted(math.fsum(sample) / len(values) for sample in product(values, repeat=len(values)))
    low, high = bootstrap_interval(values, confidence)
    outside = (1 - confidence) / 2 * len(means)
    slack = 1e-9
    assert sum(mean < low - slack for mean in means) <= outside
    assert sum(mean > high + slack for mean in means) <= outside
    assert sum(mean <= low + slack for mean in means) > outside - slack * len(means)
    assert sum(mean >= high - slack for mean in means) > outside - slack * len(means)


def test_of_three_values_it_is_the_range():
    assert bootstrap_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)


def test_of_many_values_it_is_drawn_always_the_same_and_near_the_normal_one():
    values = [math.sin(number) for number in range(40)]
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values)
    mean = sum(values) / 40
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / 40 / 40)
    assert (low, high) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.1 * error)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.inf], [math.nan, 1.0, 2.0]])
def test_without_meaning_there_is_none(values):
    assert bootstrap_interval(values) is None


def test_overlapping():
    assert overlap((0, 1), (1, 2))
    assert not overlap((0, 1), (1.1, 2))
    assert not overlap(None, (0, 1))
