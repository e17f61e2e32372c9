"""What is said of a comparison: a ranking where seeds and a shallower baseline allow one, else none."""

import math
import re

import pandas as pd
import pytest

from depthscope.report.formats import COLUMNS
from depthscope_lab.fair.verdict import verdict_of
from depthscope_lab.training import vit_digits
from depthscope_lab.training.comparison_results import summarise
from depthscope_lab.training.protocol import Choice


def said_of(losses: dict[tuple[str, int], list[float]], quantity: str = "test_loss", choices=()):
    """Of runs that ended with these losses; nan: it failed."""
    found = []
    for (variant, depth), values in losses.items():
        for seed, value in enumerate(values, start=1):
            ended = ("failed", 1.0) if math.isnan(value) else (quantity, value)
            found.append((variant, depth, 0.1, 0, seed, 9, *ended))
    frame = pd.DataFrame(found, columns=COLUMNS)
    cells, sentences = verdict_of(summarise(frame), frame, choices)
    return {(cell["variant"], cell["depth"]): cell for cell in cells}, sentences


def about(mean: float, spread: float = 0.01) -> list[float]:
    return [mean + spread * (-1) ** seed * seed for seed in range(8)]


def test_the_ranking_is_by_paired_differences_against_a_shallower_baseline():
    near = [loss + 0.001 * (-1) ** (place // 2) for place, loss in enumerate(about(1.0))]
    dead = [*about(1.0)[:-1], math.nan]
    config = vit_digits("post").changed(depth=48)
    losses = {
        ("pre", 2): about(2.0, 0.02),
        ("post", 2): about(2.5),
        ("pre", 48): about(1.0),
        ("keel", 48): near,
        ("peri", 48): about(1.5, 0.02),
        ("post", 48): about(2.1, 0.1),
        ("admin", 48): dead,
    }
    cells, said = said_of(losses, choices=[Choice(config, {1e-4: 2.0, 3e-4: 1.0}, 3e-4)])
    ranks = {place: cell["rank"] for place, cell in cells.items()}
    assert {ranks.pop(("pre", 48)), ranks.pop(("keel", 48))} == {"best", "not separated"}
    assert ranks == {
        ("pre", 2): "baseline",
        ("post", 2): "baseline",
        ("peri", 48): "worse",
        ("post", 48): "not learned",
        ("admin", 48): "died",
    }
    assert cells["peri", 48]["test_loss_low"] == min(about(1.5, 0.02))
    assert cells["admin", 48]["test_loss_high"] is None
    ranking, failed, edge = said
    assert ranking.startswith("48 blocks: ")
    assert "worse: peri (1.490, by +" in ranking
    assert "not better than pre with 2 blocks (1.990): post (2.050)" in ranking
    assert ranking.endswith("with a run that failed or was stopped: admin.")
    assert failed == "admin, 48 blocks: 1 of 8 runs failed (a loss that is not finite)."
    assert edge.endswith("a greater one may be better: post at 48 blocks (0.0003).")


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        ({("post", 2): [2.0, 2.1, 2.2], ("post", 48): [1.0, 1.1, 1.2]}, "3 seeds hardly ever separate .* --seeds 8"),
        ({("post", 48): about(2.0), ("pre", 48): about(1.0)}, "no shallower model was trained"),
    ],
)
def test_no_ranking_is_claimed_that_is_not_earned(losses, message: str):
    cells, said = said_of(losses)
    assert {cell["rank"] for cell in cells.values()} == {""}
    assert len(said) == 1
    assert re.search(message, said[0])


def test_without_the_future_is_what_counts():
    cells, _ = said_of({("post", 12): [1.0, 1.0, 1.0]}, "test_loss_future_hidden")
    assert cells["post", 12]["judged"] == "test_loss_future_hidden"
