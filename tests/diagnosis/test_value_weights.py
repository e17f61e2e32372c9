"""What is said of value weights that lean to one side, beside what was measured."""

import pytest
import torch

from depthscope import diagnose
from depthscope.measures.weights import mean_growth, product_eigenvalues
from depthscope.theory import dominance_of
from profiles_made_up import TRAINED, made_up, made_up_spectra
from samples import seeded

RISING = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7]


@pytest.mark.parametrize(
    ("curve", "shares", "expected"),
    [
        (RISING, (0.5, 0.1, 0.2, 0.1, 0.5), "blocks 2–4 mostly pull tokens together (13%"),
        (RISING, (0.5, 0.9, 0.9, 0.5, 0.9), "blocks 2–3 mostly push tokens apart (90%"),
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


@pytest.mark.parametrize(("curve", "agrees"), [(RISING, True), (RISING[::-1], False)])
def test_the_largest_eigenvalue_decides_and_not_the_share_of_negative_ones(curve: list[float], agrees: bool):
    """Nine of ten negative, and one with |1 + μ| > 1: in the end the mean of the tokens wins, says the theory."""
    spectra = made_up_spectra(*[0.9] * 5, growth=1.2)
    said = diagnose(made_up({"token_similarity": curve}, weights=TRAINED), spectra=spectra).finding("value weights")
    assert said is not None
    assert "above 1 in 100% of the heads" in said.sentence
    assert "theory says tokens grow alike there all the same" in said.sentence
    assert ("which agrees" in said.sentence) == agrees


def test_what_is_said_is_what_dominates():
    """The rule of the sentence, max |1 + μ| > 1, against the theory with a whole attention matrix, for thin heads."""
    ends = []
    for seed in range(200):
        x = torch.randn(6, 3, generator=seeded(seed), dtype=torch.float64)
        attention = (x @ x.T).softmax(dim=-1)  # similar to a positive matrix: no negative eigenvalue
        value = torch.randn(5, 3, generator=seeded(seed + 1000), dtype=torch.float64)
        inner = torch.randn(3, 3, generator=seeded(seed + 2000), dtype=torch.float64) / 3
        output = (-(seed % 3) * torch.eye(3, dtype=torch.float64) + inner) @ torch.linalg.pinv(value)
        growth = mean_growth(product_eigenvalues(value, output)).item()
        assert (growth > 1) == dominance_of(attention, value @ output).input_convergence
        ends.append(growth > 1)
    assert 40 < sum(ends) < 160
