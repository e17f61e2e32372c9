"""The exponent study of Dong et al. 2021: its quick form, what its claims rest on, and that they can fail."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.testing import assert_close

from depthscope.measures import composite_norm
from depthscope.theory import attend, lipschitz_bound
from depthscope_lab.papers.dong2021 import exponent
from depthscope_lab.papers.dong2021.exponent import critical_residual, first_tokens, layers, order_of, sine
from depthscope_lab.papers.study import Claim

STUDY, QUICK = exponent.STUDY, exponent.STUDY.quick
FALSE_OF_THE_PAPER = {  # what came out otherwise, in the full form too
    "layer normalisation does not change what the size of the values does",
}


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return exponent.compute(QUICK, lambda _share: None)


def judged(frame: pd.DataFrame) -> dict[str, Claim]:
    return {claim.claim: claim for claim in exponent.claims(frame, QUICK)}


def test_the_quick_form_says_what_the_full_form_says(frame: pd.DataFrame):
    found = judged(frame)
    assert len(found) == 11
    refuted = {title for title, claim in found.items() if claim.verdict == "not reproduced"}
    assert refuted == FALSE_OF_THE_PAPER
    assert {claim.verdict for claim in found.values()} == {"reproduced", "not reproduced"}


def test_draw_shows_the_frame_and_leaves_it_alone(frame: pd.DataFrame):
    before = frame.copy()
    figure = exponent.draw(frame)
    figure.canvas.draw()
    pd.testing.assert_frame_equal(frame, before)
    assert len(figure.axes) == 3
    assert all(ax.get_ylabel() and ax.get_xlabel() for ax in figure.axes)


def test_a_seed_fixes_the_numbers_and_progress_ends_at_one():
    small = replace(QUICK, trials=2, depth=3, gains=(1.0, 64.0), mlp_depth=4)
    shares: list[float] = []
    first = exponent.compute(small, shares.append)
    pd.testing.assert_frame_equal(first, exponent.compute(small, lambda _share: None))
    assert shares == sorted(shares)
    assert shares[-1] == 1
    other = exponent.compute(replace(small, seed=1), lambda _share: None)
    assert not np.allclose(first["residual"].dropna()[:2], other["residual"].dropna()[:2])


@pytest.mark.parametrize(
    ("change", "titles"),
    [
        ({"exponent": lambda f: f["exponent"] - 1}, ["with one head, log e grows by the factor 3 per layer"]),
        ({"order": lambda f: f["order"] + 0.02}, ["the residual after a layer", "a skip with LN"]),
        ({"log_bound": lambda f: f["log_bound"] - 40}, ["the bound of Thm 2.2 and 2.3 holds in every layer"]),
        ({"threshold": 1e3}, ["tokens collapse of which the theorem promises nothing"]),
        ({"residual": lambda f: f["residual"] * 0.9 ** f["layer"]}, ["skip connections stop the collapse"]),
        ({"critical": lambda f: f["critical"] * 1e-9}, ["the residual above which an MLP stops the collapse"]),
    ],
)
def test_claims_fail_on_other_numbers(frame: pd.DataFrame, change: dict, titles: list[str]):
    found = judged(frame.assign(**change))
    for title in titles:
        (claim,) = [claim for name, claim in found.items() if name.startswith(title)]
        assert claim.verdict == "not reproduced"


def test_one_head_and_several_are_cut_from_the_same_matrices():
    layer = next(layers(2, 8, 4, (0,)))
    assert layer.many.query.shape == (2, 4, 8, 2)
    joined = (layer.one.query @ layer.one.key.mT).squeeze(1)
    assert_close((layer.many.query @ layer.many.key.mT).sum(dim=1), joined)
    assert_close(layer.many.value.sum(dim=1), layer.one.value.squeeze(1))


def test_order_is_the_power_of_the_residual():
    layer, tokens = next(layers(2, 8, 4, (0,))), first_tokens(2, 5, 8, (1,)).scaled(1e-6)
    for case, wanted in {"one head": 3.0, "LN": 3.0, "MLP": 3.0, "skip": 1.0, "causal": 1.0}.items():
        assert order_of(case, tokens, layer).tolist() == pytest.approx([wanted] * 2, abs=1e-4)


def test_gain_multiplies_the_lipschitz_constant():
    layer, gains = next(layers(2, 8, 4, (0,))), torch.tensor([1.0, 4.0], dtype=torch.float64)
    bounds = lipschitz_bound(sine(layer, gains))
    assert_close(bounds[:, 1], 4 * bounds[:, 0])


def test_below_the_critical_residual_tokens_collapse_and_above_they_do_not():
    source, start = layers(2, 16, 2, (0,)), first_tokens(2, 6, 16, (1,))
    stack = [next(source) for _ in range(8)]
    gains = torch.tensor([256.0], dtype=torch.float64)
    found = critical_residual(start, stack, gains)
    for factor, collapses in ((0.5, True), (2.0, False)):  # the shared token is chaotic here: not nearer
        scale = factor * found.squeeze(-1) / composite_norm(start.residual)
        last = start.scaled(scale[:, None, None])
        for layer in stack:
            attended = attend(last, layer.many)
            weights = sine(layer, gains)
            hidden = torch.sin(attended.tokens @ weights.expand[:, 0])
            last = type(start).of(hidden @ weights.contract[:, 0])  # the naive way, which ends at 1e-16
        assert ((composite_norm(last.residual) < 1e-8) == collapses).all()
