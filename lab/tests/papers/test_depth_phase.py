"""depth-phase: a training against the naive loop, lines and claims on cells that are made up."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import balanced_accuracy_score

import depthscope
from depthscope.remedies import DeEscalate, ResidualWeight
from depthscope_lab.papers.deep import phase
from depthscope_lab.papers.deep.phase import balanced_accuracy, claims, fitted, inside
from depthscope_lab.training.data.order import batch_indices
from depthscope_lab.training.kept import plain as plain_data

CONFIG = phase.Config(rates=(1e-2,), steps=3, batch=8)


def plain(wiring, alpha: float, tau: float, dtype=torch.float64):
    model = phase.build(CONFIG, 3, wiring).to(dtype)
    return depthscope.apply(model, ResidualWeight(alpha), *([DeEscalate(tau, at="output")] if tau else []))


def test_a_training_is_that_of_the_plain_model():
    found = phase.train(CONFIG, 3, "post", 0.3, 0.5, 1e-2, lambda _share: None)
    model = plain("post", 0.3, 0.5, torch.float32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    data, losses = phase.digits(), []
    for step in range(CONFIG.steps):
        chosen = batch_indices(CONFIG.seed, step, len(data.train_images), CONFIG.batch)
        scores = model(phase.pixels(data.train_images[chosen]))
        loss = torch.nn.functional.cross_entropy(scores, data.train_labels[chosen])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert found["losses"] == pytest.approx(losses, rel=1e-3)  # Adam's first steps are signs: rounding matters
    with torch.no_grad():
        scores = model(phase.pixels(data.test_images))
    expected = torch.nn.functional.cross_entropy(scores, data.test_labels).item()
    assert found["valid_loss"] == pytest.approx(expected, rel=1e-3)


def test_a_cell_that_is_no_number_has_failed():
    found = plain_data(phase.train(CONFIG, 3, "pre", 1e30, 0.0, 1e-2, lambda _share: None))
    assert None in found["losses"] or found["valid_loss"] is None
    assert phase.chosen_rate([found])["loss"] == math.inf


def test_the_rate_is_chosen_on_images_that_were_held_back():
    def run(rate: float, valid: float | None, last: float):
        return {"rate": rate, "valid_loss": valid, "losses": [2.0] * 5 + [last] * 10}

    found = phase.chosen_rate([run(1.0, 0.5, 0.1), run(2.0, 0.4, 0.2), run(3.0, None, 0.05)])
    assert (found["rate"], found["loss"]) == (2.0, pytest.approx(0.2))


# --- lines and claims on cells that are made up ---------------------------------------------------------


def made_up(depth: int, least: float = 1e-3, most: float = 1e4) -> pd.DataFrame:
    """Cells that train exactly where t_div ≥ `least` and the gradient stays within `most`."""
    diversity, growth = np.meshgrid(10.0 ** -np.arange(0, 8, 0.7), np.linspace(-3, 18, 12))
    cells = pd.DataFrame({"diversity": diversity.ravel(), "growth": growth.ravel()}).assign(depth=depth)
    cells["trains"] = (cells["diversity"] >= least) & (cells["growth"].abs() <= math.log(most))
    cells["loss"] = np.where(cells["trains"], 0.5, 2.3)
    return cells


def judged(lines: tuple[float, float], cells: pd.DataFrame) -> pd.DataFrame:
    cells = cells.assign(map="judged", wiring="post", expected=inside(cells, *lines))
    cells["least_diversity"], cells["most_growth"] = lines
    return cells


def test_lines_are_found_where_they_are():
    cells = made_up(50)
    diversity, growth = fitted(cells)
    assert balanced_accuracy(inside(cells, diversity, growth), cells["trains"]) == 1
    assert abs(math.log10(diversity / 1e-3)) < 0.7  # as far as the cells are apart
    assert abs(math.log(growth / 1e4)) < 2
    assert all(map(math.isfinite, fitted(cells.assign(trains=True))))


def test_balanced_accuracy_is_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    expected, trains = rng.random(40) < 0.4, rng.random(40) < 0.7
    assert balanced_accuracy(expected, trains) == pytest.approx(balanced_accuracy_score(trains, expected))
    assert math.isnan(balanced_accuracy([True, False], [True, True]))


def test_the_claim_holds_where_it_should_and_fails_where_it_should():
    lines, config = fitted(made_up(50)), phase.Config()
    right = judged(lines, made_up(100))
    moved = judged(lines, made_up(100, least=1e-6))  # another depth has another line
    verdicts = [claims(cells, config)[0].verdict for cells in (right, moved, right.assign(trains=True))]
    assert verdicts == ["reproduced", "not reproduced", "not testable here"]


def test_the_quick_form_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, shares = phase.STUDY.quick, []
    real, calls = phase.train, []

    def counted(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(phase, "train", counted)
    with pytest.raises(KeyboardInterrupt):
        phase.STUDY.compute(config, shares.append, tmp_path)
    frame = phase.STUDY.compute(config, shares.append, tmp_path)
    cells = sum(len(one.alphas) * len(one.taus) for one in (config.fit, config.judged))
    groups = 2 * len(config.rates) * cells
    assert len(calls) == groups + 1  # the one that was interrupted
    assert shares[-1] == pytest.approx(1.0)
    pd.testing.assert_frame_equal(frame, phase.STUDY.compute(config, shares.append, tmp_path))
    assert len(calls) == groups + 1
    cells = frame[frame["map"] == "judged"]
    assert len(cells) == 2 * len(config.judged.alphas) * len(config.judged.taus)
    assert cells["loss"].between(0, 5).all()
    assert len(phase.STUDY.draw(frame).axes) == 3  # two maps and the scale of colours
    assert {claim.verdict for claim in phase.STUDY.claims(frame, config)} == {"not testable here"}
