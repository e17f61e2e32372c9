"""Studies on the fair protocol: what is read from their table; no process is started."""

import math
from pathlib import Path

import pytest

from depthscope_lab.papers import fair
from depthscope_lab.training import protocol, vit_digits
from depthscope_lab.training.comparison import Launch
from depthscope_lab.training.protocol import Protocol
from pretended_runs import pretend


@pytest.fixture
def frame(tmp_path: Path, monkeypatch):
    """post-norm's best rate is in the middle of its grid, pre-norm's beyond it."""
    monkeypatch.setattr(protocol, "run_cells", pretend([], {"post": 1e-3, "pre": 1.2e-2}))
    configs = [vit_digits(variant).changed(depth=2, lr=1e-3) for variant in ("post", "pre")]
    shares: list[float] = []
    found = fair.train_fairly(configs, Protocol(7, more=1), Launch(tmp_path), shares.append)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return found


def test_the_table_has_the_runs_that_were_judged_and_every_rate_that_was_tried(frame):
    judged = fair.measured(frame)
    assert set(judged["seed"]) == {1, 2, 3}
    assert set(judged["quantity"]) == {"loss", "test_loss", "test_accuracy", "token_similarity"}
    tried = fair.tried_rates(frame)
    assert sorted(tried["post", 2]) == pytest.approx([3e-4, 1e-3, 3e-3])
    assert sorted(tried["pre", 2]) == pytest.approx([3e-4, 1e-3, 3e-3, 9e-3])  # one beyond the grid
    assert tried["post", 2][1e-3] == pytest.approx(1.0)


def test_rows_have_interval_rank_and_edge(frame):
    post, pre = fair.ranked(frame)
    assert (post["lr"], post["edge"], post["rank"]) == (1e-3, "", "best")
    assert (pre["lr"], pre["edge"], pre["rank"]) == (9e-3, "greatest", "worse")
    assert fair.with_bounds(post) == "1.020 (1.010 to 1.030)"
    said = fair.rates_in_words([post, pre], {"post": "post-norm"})
    assert said == "post-norm 0.001, pre 0.009 (the greatest that was tried)"


def test_a_rate_that_failed_is_in_the_table_and_runs_that_failed_have_no_interval(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(protocol, "run_cells", pretend([], {"post": 1.0}))
    config = vit_digits("post").changed(depth=2, lr=1.0)
    frame = fair.train_fairly([config], Protocol(7, more=0), Launch(tmp_path), lambda _share: None)
    assert set(fair.tried_rates(frame)["post", 2].values()) == {math.inf}
    (row,) = fair.ranked(frame)
    assert (row["failed"], row["rank"], fair.with_bounds(row)) == (3, "", "all runs failed")
