"""Fig. 6: the quick form trains and draws, and every verdict can fail."""

from pathlib import Path

import pandas as pd
import pytest

from depthscope.report.formats import COLUMNS
from depthscope_lab.papers import load
from depthscope_lab.papers.fair import TRIED
from depthscope_lab.papers.study import configure, earlier, run

STUDY = load("yu2024-fig6")
LAGS = "the post-norm model fails or lags behind the de-escalated model"
TRAINS = "the de-escalated model trains"
CLOSE = "the de-escalated model is close to the pre-norm model"
AS_PUBLISHED = {"post": (2.2, 0.12), "pre": (1.0, 0.7), "deescalated": (1.05, 0.68)}  # losses, accuracy


def frame_of(ends: dict[str, tuple[float, float]], failed: tuple[str, ...] = ()) -> pd.DataFrame:
    rows = []
    for variant, (loss, accuracy) in ends.items():
        numbers = {"loss": loss, "test_loss": loss, "test_accuracy": accuracy}
        if variant in failed:
            numbers["failed"] = 1.0
        for name, value in numbers.items():
            rows.append((variant, 48, 1e-4, 0, 0, 100, name, value))
    return pd.DataFrame(rows, columns=COLUMNS)


def refuted(frame: pd.DataFrame) -> set[str]:
    return {claim.claim for claim in STUDY.claims(frame, STUDY.full) if claim.verdict == "not reproduced"}


def test_every_verdict_can_fail():
    assert refuted(frame_of(AS_PUBLISHED)) == set()
    assert refuted(frame_of(AS_PUBLISHED | {"post": (1.2, 0.6)})) == {LAGS}
    assert refuted(frame_of(AS_PUBLISHED | {"pre": (0.1, 0.9)})) == {CLOSE}
    assert refuted(frame_of(AS_PUBLISHED | {"deescalated": (1.05, 0.15)})) == {TRAINS}
    assert refuted(frame_of(AS_PUBLISHED | {"deescalated": (2.3, 0.1)})) == {LAGS, TRAINS, CLOSE}


def test_a_run_that_failed_has_come_nowhere():
    assert refuted(frame_of(AS_PUBLISHED | {"post": (0.5, 0.9)}, failed=("post",))) == set()
    assert refuted(frame_of(AS_PUBLISHED, failed=("deescalated",))) == {LAGS, TRAINS, CLOSE}
    everything = frame_of(AS_PUBLISHED, failed=tuple(AS_PUBLISHED))
    assert refuted(everything[everything["quantity"] == "failed"]) == {LAGS, TRAINS, CLOSE}


def test_the_quick_form_trains_draws_and_judges_nothing(tmp_path: Path):
    shares: list[float] = []
    claims = run(STUDY, STUDY.quick, tmp_path, shares.append)
    assert {claim.verdict for claim in claims} == {"not testable here"}
    assert "too few steps" in claims[0].note
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    frame = pd.read_parquet(tmp_path / "yu2024-fig6" / "data.parquet")
    assert set(frame["variant"]) == {"post", "pre", "deescalated"}
    assert frame[frame["quantity"] == "loss"]["value"].between(1.5, 3).all()
    assert set(frame[frame["quantity"] == "test_loss"]["seed"]) == {1, 2, 3}
    assert (frame["quantity"] == TRIED).sum() == 9
    assert earlier(STUDY, STUDY.quick, tmp_path).claims == claims


def test_the_papers_scale_is_the_recipe_and_not_testable_without_a_gpu(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = configure(STUDY, scale="paper")
    assert (config.recipe, config.settings, config.steps, config.trials) == ("vit-cifar10", {}, None, 3)
    claims = run(STUDY, config, tmp_path)
    assert {claim.verdict for claim in claims} == {"not testable here"}
    assert "GPU" in claims[0].note
    assert not [path for path in (tmp_path / "yu2024-fig6").iterdir() if path.is_dir()]  # nothing was trained


def test_a_folder_of_cifar_changes_the_form():
    config = configure(STUDY, data="folder")
    assert (config.form, config.recipe, config.data) == ("cifar10", "vit-cifar10", "folder")
    assert configure(STUDY, data="folder", scale="paper").form == "paper"
    with pytest.raises(ValueError, match="yu2024-fig6 --quick brings its data; leave --data out"):
        configure(STUDY, quick=True, data="folder")
    with pytest.raises(ValueError, match="yu2024-fig4 has no data"):
        configure(load("yu2024-fig4"), data="folder")
    with pytest.raises(ValueError, match="has no scale 'huge'; scales: paper"):
        configure(STUDY, scale="huge")
