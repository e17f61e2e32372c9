"""language-collapse: the means that it takes apart, its quick form, and claims that can fail."""

import pandas as pd
import pytest
import torch

from depthscope_lab.models.carried_mean import CarriedMean
from depthscope_lab.papers import load
from depthscope_lab.papers.deep.language_collapse import (
    ARMS,
    BOTH,
    CARRIED,
    COUPLED,
    POST,
    SEGMENT,
    TOLD,
    Coupled,
    Detached,
    OfSegment,
    build,
)
from depthscope_lab.papers.yu2024.fig7 import Case, configured, load_corpus
from depthscope_lab.training.language import LanguageModelling

STUDY = load("language-collapse")
TOKENS = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BEFORE = torch.randn(2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
WEIGHT = torch.tensor(7.0, dtype=torch.float64)  # of seven tokens


def gradient_of_a_common_loss(mean: CarriedMean) -> torch.Tensor:
    """Of the sum of all tokens: what would move them all in one direction."""
    tokens = TOKENS.clone().requires_grad_()
    mean.subtract(tokens, BEFORE, WEIGHT)[0].sum().backward()
    assert tokens.grad is not None
    return tokens.grad


def test_a_coupled_mean_is_the_carried_one_and_stops_what_is_common():
    carried, coupled = (mean.subtract(TOKENS, BEFORE, WEIGHT) for mean in (CarriedMean(), Coupled()))
    assert torch.allclose(carried[0], coupled[0])
    assert torch.equal(carried[1], coupled[1])
    assert gradient_of_a_common_loss(Coupled()).abs().max() < 1e-12
    assert gradient_of_a_common_loss(CarriedMean()).mean() > 0.7  # a token has 1/8 of its mean, or less


def test_a_mean_that_begins_with_the_segment_knows_nothing_before_or_after_it():
    found = OfSegment().subtract(TOKENS, BEFORE, WEIGHT)[0]
    assert torch.equal(found, OfSegment().subtract(TOKENS, 2 * BEFORE, WEIGHT)[0])
    later = TOKENS.clone()
    later[:, 3:] += 1
    assert torch.equal(found[:, :3], OfSegment().subtract(later, BEFORE, WEIGHT)[0][:, :3])
    expected = torch.stack([TOKENS[:, i] - TOKENS[:, : i + 1].mean(dim=1) for i in range(1, 5)], dim=1)
    assert torch.allclose(found[:, 1:], expected)
    assert gradient_of_a_common_loss(OfSegment()).mean() == pytest.approx(
        0.2
    )  # of the first token, which is left alone


def test_a_detached_mean_lets_every_gradient_pass():
    tokens = TOKENS.clone().requires_grad_()
    Detached().subtract_of_segment(tokens).sum().backward()
    assert torch.equal(tokens.grad, torch.ones_like(tokens))  # type: ignore[arg-type]


def test_the_head_is_told_in_two_arms():
    task = LanguageModelling(configured(STUDY.quick.training, Case("post"), 1e-3, 0), load_corpus(None))
    biases = {arm: build(arm, task).softmax.bias for arm in ARMS}
    assert {arm for arm, bias in biases.items() if bias.abs().max() > 0} == {TOLD, BOTH}
    assert biases[TOLD].exp().sum().item() == pytest.approx(1, abs=1e-4)


def made_up(inside: dict[str, float], left: dict[str, float], ends: dict[str, float]) -> pd.DataFrame:
    rows = []
    for arm in ARMS:
        for step in (0, 50, 90, 100):
            late = step >= 90
            rows.append((arm, step, 1, "gradient", left.get(arm, 0.5) if late else 1.0))
            for block in (1, 2, 3):
                high = ends if block == 3 else inside
                default = (0.5 if arm in (TOLD, BOTH) else 0.9) if block == 3 else 0.1
                rows.append((arm, step, block, "token_similarity", high.get(arm, default) if late else 0.0))
    return pd.DataFrame(rows, columns=["arm", "step", "block", "quantity", "value"])


@pytest.mark.parametrize(
    ("inside", "left", "ends", "fallen"),
    [
        ({CARRIED: 0.9}, {CARRIED: 0.01}, {}, set()),
        ({CARRIED: 0.4}, {CARRIED: 0.01}, {}, {0, 1}),
        ({CARRIED: 0.9}, {CARRIED: 0.2}, {}, {0, 2}),
        ({CARRIED: 0.9, COUPLED: 0.6}, {CARRIED: 0.01}, {}, {1}),
        ({CARRIED: 0.9}, {CARRIED: 0.01, TOLD: 0.05}, {}, {2}),
        ({CARRIED: 0.9}, {CARRIED: 0.01}, {SEGMENT: 0.7}, {3}),
        ({CARRIED: 0.9}, {CARRIED: 0.01}, {BOTH: 0.85}, {3}),
        ({CARRIED: 0.9}, {CARRIED: 0.01}, {POST: 0.1}, set()),  # it has no mean: a reference, and no claim
    ],
)
def test_each_claim_can_fail(
    inside: dict[str, float], left: dict[str, float], ends: dict[str, float], fallen: set[int]
):
    found = STUDY.claims(made_up(inside, left, ends), STUDY.full)
    assert {place for place, claim in enumerate(found) if claim.verdict != "reproduced"} == fallen


def test_the_quick_form_is_computed_and_drawn():
    shares: list[float] = []
    frame = STUDY.compute(STUDY.quick, shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert set(frame["arm"]) == set(ARMS)
    assert frame["value"].notna().all()
    assert len(STUDY.draw(frame).axes) == 4
    assert len(STUDY.claims(frame, STUDY.quick)) == 4
