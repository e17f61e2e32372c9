"""The fair protocol: which rates, which seeds, which data. No process is started."""

import json
import math
from pathlib import Path

import pytest
import torch

from depthscope_lab.training import make_task, txl_manual, vit_digits
from depthscope_lab.training import protocol as fair
from depthscope_lab.training.comparison import Cell, Launch
from depthscope_lab.training.protocol import Protocol
from depthscope_lab.training.task import Share
from pretended_runs import pretend

SMALL = {"depth": 1, "width": 8, "heads": 1, "ffn_width": 8}


def small(variant="post", **changes):
    return vit_digits(variant).changed(**(SMALL | changes))


@pytest.fixture
def pretended(monkeypatch):
    """The cells that were asked for; no process is started."""
    asked: list[Cell] = []
    monkeypatch.setattr(fair, "run_cells", pretend(asked, {"post": 1e-4, "pre": 1e-3}))
    return asked


def test_rates_are_chosen_on_validation_data_and_seeds_are_fresh(tmp_path: Path, pretended):
    configs = [small("post", lr=1e-4), small("pre", lr=1e-3)]
    choices, results = fair.run_protocol(configs, Protocol(7), Launch(tmp_path))
    tuning = [cell.config for cell in pretended if cell.config.evaluate_on == "validation"]
    judged = [cell.config for cell in pretended if cell.config.evaluate_on == "test"]
    assert {config.seed for config in tuning}.isdisjoint({config.seed for config in judged})
    assert sorted(config.lr for config in tuning) == pytest.approx([3e-5, 1e-4, 3e-4, 3e-4, 1e-3, 3e-3])
    assert [(choice.lr, choice.edge) for choice in choices] == [(1e-4, ""), (1e-3, "")]
    assert {(config.variant, config.lr, config.seed) for config in judged} == {
        (variant, lr, seed) for variant, lr in (("post", 1e-4), ("pre", 1e-3)) for seed in (1, 2, 3)
    }
    assert {config.steps for config in (*tuning, *judged)} == {7}
    assert len({cell.name for cell in pretended}) == len(pretended) == 12
    assert len(results) == 6


def test_the_grid_grows_where_the_best_rate_is_at_its_edge_but_not_for_ever(tmp_path: Path, pretended):
    near, far = fair.choose_rates([small("pre", lr=3e-4), small("pre", lr=1e-7)], Protocol(7), Launch(tmp_path))
    assert near.lr == pytest.approx(9e-4)
    assert near.edge == ""
    assert len(near.tried) == 4
    assert far.edge == "greatest"
    assert len(far.tried) == 5
    assert max(far.tried) == pytest.approx(1e-7 * 3 * 10 / 3 * 10 / 3, rel=0.2)


def test_a_rate_that_fails_is_not_chosen_and_the_grid_goes_down(tmp_path: Path, pretended):
    (choice,) = fair.choose_rates([small("pre", lr=1.0)], Protocol(7, more=3), Launch(tmp_path))
    assert choice.tried[1.0] == math.inf
    assert choice.lr == min(choice.tried)
    assert choice.edge == "least"
    json.dumps(choice.as_json()["lr"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"factors": (1.0,)}, "at least 2 rates"),
        ({"factors": (3.0, 1.0, 1.0000001)}, "differ by 1 % or more, got the factors 3, 1, 1.0000001"),
        ({"factors": (0.0, 1.0)}, "above 0, got 0, 1"),
        ({"factors": (1.0, math.inf)}, "above 0, got 1, inf"),
        ({"seeds": (1, 2)}, "at least 3 seeds"),
    ],
)
def test_what_would_not_be_fair_is_refused(wrong, message: str):
    with pytest.raises(ValueError, match=message):
        Protocol(10, **wrong)


def test_a_model_that_sees_the_future_has_all_judged_on_what_it_reads_without_it():
    configs = [txl_manual("post"), txl_manual("deescalated-leaking")]
    assert {config.eval_segments for config in fair.prepared(configs)} == {4}
    assert {config.eval_segments for config in fair.prepared(configs[:1])} == {None}


# --- validation data ------------------------------------------------------------------------------


def test_validation_images_are_training_images_that_are_not_trained_on():
    test, valid = (make_task(small(evaluate_on=which)) for which in ("test", "validation"))
    assert len(valid.data.train_images) + len(valid.data.test_images) == len(test.data.train_images)
    assert (valid.data.test_images == test.data.train_images[len(valid.data.train_images) :]).all()
    model = valid.build()
    whole = Share(0, 1), torch.device("cpu")
    assert {"valid_loss", "valid_accuracy", "count"} == set(valid.evaluate(model, *whole))
    assert {"test_loss", "test_accuracy", "count"} == set(test.evaluate(model, *whole))
