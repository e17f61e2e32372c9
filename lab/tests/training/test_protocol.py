"""The fair protocol: which rates, which seeds, which data; its plan, its budget, its verdict. No process is started."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from depthscope_lab.training import make_task, txl_manual, vit_digits
from depthscope_lab.training import protocol as fair
from depthscope_lab.training.comparison import Cell, Launch, Result
from depthscope_lab.training.comparison_results import curves, summarise
from depthscope_lab.training.comparison_verdict import ranks, verdict_of, with_intervals
from depthscope_lab.training.metrics import append_metrics
from depthscope_lab.training.plan import (
    Costs,
    fitted,
    in_words,
    keep_plan,
    kept_plan,
    make_plan,
    measure_costs,
    request_of,
)
from depthscope_lab.training.protocol import Choice, Protocol
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


def test_runs_one_after_the_other_grow_the_grid_alike():
    def loss_at(best: float):
        return lambda rate: abs(math.log(rate / best)) if rate < 1 else math.inf

    assert list(fair.search_rates((1e-4, 3e-4, 1e-3), 2, loss_at(3e-4))) == [1e-4, 3e-4, 1e-3]
    assert list(fair.search_rates((1e-4, 3e-4, 1e-3), 2, loss_at(3e-3))) == pytest.approx(
        [1e-4, 3e-4, 1e-3, 3.33333e-3, 0.0111111], rel=1e-5
    )
    assert min(fair.search_rates((1e-4, 3e-4, 1e-3), 1, loss_at(1e-9))) == pytest.approx(3.33333e-5)
    assert fair.best(fair.search_rates((1.0, 2.0), 3, lambda _: math.inf)) < 1


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


# --- time -------------------------------------------------------------------------------------------


def costs(step: float = 0.1, start: float = 5.0) -> Costs:
    return Costs({("post", 1): step, ("pre", 1): 2 * step}, 1.0, start, 50, 1000)


CONFIGS = [small("post"), small("pre")]


def test_the_time_of_a_plan_adds_up(tmp_path: Path):
    launch = Launch(tmp_path, options={"watch_every": None})
    run = costs().run(CONFIGS[0], 100, launch)
    assert run == pytest.approx(5 + 1.15 * 0.1 * (100 + 2))
    least, most = costs().total(CONFIGS, Protocol(100), replace(launch, jobs=2))
    both = run + costs().run(CONFIGS[1], 100, launch)
    assert (least, most) == pytest.approx((6 * both / 2, 8 * both / 2))


def test_a_budget_takes_rates_beyond_the_grid_first_then_steps_then_refuses(tmp_path: Path):
    launch, wanted = Launch(tmp_path), Protocol(1000)
    whole = costs().total(CONFIGS, wanted, launch)[1]
    assert fitted(CONFIGS, wanted, costs(), launch, whole, asked=False) == (wanted, [])
    less, said = fitted(CONFIGS, wanted, costs(), launch, 0.9 * whole, asked=False)
    assert (less.more, less.steps) == (1, 1000)
    assert said == ["rates beyond the grid are at most 1 instead of 2, to keep to the budget"]
    short, said = fitted(CONFIGS, wanted, costs(), launch, 0.3 * whole, asked=False)
    assert short.more == 0
    assert 100 <= short.steps < 1000
    assert 0.27 * whole < costs().total(CONFIGS, short, launch)[1] <= 0.3 * whole
    assert said[1] == f"{short.steps} steps a run instead of 1000, to keep to the budget"
    with pytest.raises(ValueError, match=r"expected a --budget of at least .* 100 steps, got 30 s: give fewer"):
        fitted(CONFIGS, wanted, costs(), launch, 30, asked=False)
    with pytest.raises(ValueError, match=r"of 1000 steps, got .* or fewer --steps"):  # what was asked for is not cut
        fitted(CONFIGS, wanted, costs(), launch, 0.3 * whole, asked=True)


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (99, "99 s"), (120, "2 min"), (3600, "1 h"), (7260, "2 h 1 min")]
)
def test_times_in_words(seconds: float, words: str):
    assert in_words(seconds) == words


def test_steps_are_timed_for_every_variant_and_depth_and_leave_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("depthscope_lab.training.plan._start", lambda: 1.0)
    configs = [small(variant, depth=depth) for variant in ("post", "pre") for depth in (1, 3)]
    found = measure_costs(configs, Launch(tmp_path / "out", options={"cpu": True}))
    assert found.step.keys() == {(config.variant, config.depth) for config in configs}
    assert all(seconds > 0 for seconds in found.step.values())
    assert (found.steps_per_epoch, found.recipe_steps) == (22, 330)
    assert not (tmp_path / "out").exists()


def test_a_plan_is_made_once_and_known_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("depthscope_lab.training.plan.measure_costs", lambda *_: costs())
    launch, asked = Launch(tmp_path), ((0.3, 1.0, 3.0), 3, 7200.0)
    plan = make_plan(CONFIGS, launch, factors=asked[0], seeds=3, budget=7200.0)
    request = request_of(CONFIGS, launch, *asked)
    assert kept_plan(tmp_path, CONFIGS, request) is None
    keep_plan(tmp_path, plan, request)
    assert kept_plan(tmp_path, CONFIGS, request) == plan
    assert kept_plan(tmp_path, CONFIGS, request_of(CONFIGS, launch, asked[0], 4, 7200.0)) is None
    path = tmp_path / "plan.json"
    path.write_text(path.read_text().replace('"more": 2', '"more": 1'))
    with pytest.raises(ValueError, match=r"plan.json is damaged: .* remove it"):
        kept_plan(tmp_path, CONFIGS, request)


# --- the verdict ------------------------------------------------------------------------------------


def rows_of(losses: dict[tuple[str, int], list[float]], tmp_path: Path):
    """As from runs that ended with these test losses; nan: it failed."""
    launch, results = Launch(tmp_path), []
    for (variant, depth), values in losses.items():
        for seed, value in enumerate(values, start=1):
            cell = Cell(small(variant, depth=depth, seed=seed, steps=1))
            launch.run_folder(cell).mkdir(parents=True)
            append_metrics(launch.run_folder(cell) / "metrics.jsonl", 1, {"test_loss": value})
            results.append(Result(cell, "not finite" if math.isnan(value) else None))
    frame = curves(results, launch)
    return with_intervals(summarise(frame), frame)


def test_who_overlaps_the_best_is_equal_to_it(tmp_path: Path):
    losses = {
        ("post", 12): [2.0, 2.1, 2.2],
        ("pre", 12): [1.0, 1.1, 1.2],
        ("deescalated", 12): [1.15, 1.3, 1.4],
        ("post", 24): [2.3, 2.4, 2.5],
        ("pre", 24): [0.8, 0.8, 0.9],
        ("deescalated", 24): [0.5, math.nan, 0.5],
    }
    rows = rows_of(losses, tmp_path)
    assert list(ranks(rows).values()) == ["worse", "best", "equal", "worse", "best", ""]
    assert (rows[0]["test_loss_low"], rows[0]["test_loss_high"]) == (2.0, 2.2)
    assert rows[5]["test_loss_low"] is None
    config = small("post", depth=24)
    said = verdict_of(
        rows, [Choice(config, {1e-4: 2.0, 3e-4: 1.0}, 3e-4), Choice(config, {1.0: 2, 2.0: 1, 3.0: 2}, 2.0)]
    )
    assert said == [
        "12 blocks: pre (1.100, 1.000 to 1.200) is lowest; not distinguishable from it (intervals overlap): "
        "deescalated (1.283, 1.150 to 1.400); worse: post (2.100, 2.000 to 2.200).",
        "24 blocks: pre (0.833, 0.800 to 0.900) is best; worse: post (2.400, 2.300 to 2.500).",
        "post: 24 blocks are worse than 12 (2.400 against 2.100).",
        "pre: 24 blocks are better than 12 (0.833 against 1.100).",
        "deescalated, 24 blocks: 1 of 3 runs failed (a loss that is not finite), "
        "so that it has no interval and no rank.",
        "The chosen rate is the greatest that was tried, and a greater one may be better: post at 24 blocks (0.0003).",
    ]


def test_without_the_future_is_what_counts(tmp_path: Path):
    rows = rows_of({("post", 12): [1.0, 1.0, 1.0]}, tmp_path)
    frame = pd.DataFrame(
        [("post", 12, rows[0]["lr"], 0, seed, 1, "test_loss_future_hidden", 3.0) for seed in (1, 2, 3)],
        columns=["variant", "depth", "lr", "warmup_steps", "seed", "step", "quantity", "value"],
    )
    (row,) = with_intervals([{**rows[0], "test_loss_future_hidden": 3.0}], frame)
    assert row["judged"] == "test_loss_future_hidden"
    assert "the future hidden" in verdict_of([row], [])[0]
