"""What is said of value weights that lean to one side, beside what was measured."""

import pytest

from depthscope import diagnose
from profiles_made_up import TRAINED, made_up, made_up_spectra

RISING = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


@pytest.mark.parametrize(
    ("curve", "shares", "expected"),
    [
        (RISING, (0.5, 0.1, 0.2, 0.1, 0.5), "blocks 2 to 4 pull tokens together (13%"),
        (RISING, (0.5, 0.9, 0.9, 0.5, 0.9), "blocks 2 to 3 push tokens apart (90%"),
    ],
)
def test_the_longest_run_is_named(curve: list[float], shares: tuple[float, ...], expected: str):
    found = diagnose(made_up({"token_similarity": curve}, weights=TRAINED), spectra=made_up_spectra(*shares))
    said = found.finding("value weights")
    assert said is not None
    assert expected in said.sentence


@pytest.mark.parametrize(
    ("curve", "share", "agrees"),
    [(RISING, 0.1, True), (RISING, 0.9, False), (RISING[::-1], 0.9, True), (RISING[::-1], 0.1, False)],
)
def test_theory_is_held_against_what_was_measured(curve: list[float], share: float, agrees: bool):
    found = diagnose(made_up({"token_similarity": curve}, weights=TRAINED), spectra=made_up_spectra(*[share] * 5))
    said = found.finding("value weights")
    assert said is not None
    assert ("which agrees" in said.sentence) == agrees
    assert ("does not agree" in said.sentence) == (not agrees)
    assert (said.numbers["before"], said.numbers["after"]) == (curve[0], curve[-1])


def test_weights_that_lean_to_no_side_are_not_mentioned():
    found = diagnose(made_up({"token_similarity": RISING}, weights=TRAINED), spectra=made_up_spectra(*[0.5] * 5))
    assert found.finding("value weights") is None
