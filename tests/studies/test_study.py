"""A study's folder is complete or as it was, and an earlier run counts only for its own configuration."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from depthscope.studies import ENTRIES, load
from depthscope.studies.study import FILES, Study, configure, finished, judge, run


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 4
    levels: tuple[float, ...] = (0.5, 1.0)


@dataclass(frozen=True)
class WithoutTrials:
    seed: int = 0


def compute(config, progress):
    progress(1.0)
    return pd.DataFrame({"x": range(config.trials), "y": [config.seed] * config.trials})


def draw(frame):
    figure = Figure()
    figure.subplots().plot(frame["x"], frame["y"])
    return figure


def claims(frame, config):
    return [judge("there are rows", paper="§1", ours=str(len(frame)), tolerance="none", holds=len(frame) > 0)]


STUDY = Study("sample", Config(), Config(trials=2), compute, draw, claims)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_run_writes_every_file_and_nothing_else(tmp_path: Path):
    shares: list[float] = []
    found = run(STUDY, STUDY.full, tmp_path / "new", shares.append)
    assert shares == [1.0]
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sample"]  # no scratch folder is left
    folder = tmp_path / "new" / "sample"
    assert {path.name for path in folder.iterdir()} == set(FILES)
    assert len(pd.read_parquet(folder / "data.parquet")) == 4
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    (claim,) = json.loads((folder / "claims.json").read_text())
    assert list(claim) == ["claim", "paper", "ours", "tolerance", "verdict", "note"]
    assert claim["verdict"] == found[0].verdict == "reproduced"
    config = json.loads((folder / "config.json").read_text())
    assert config == {"study": "sample", "seed": 0, "trials": 4, "levels": [0.5, 1.0]}


def test_finished_knows_its_own_configuration_only(tmp_path: Path):
    assert finished(STUDY, STUDY.full, tmp_path) is None
    made = run(STUDY, STUDY.full, tmp_path)
    assert finished(STUDY, STUDY.full, tmp_path) == made
    assert finished(STUDY, STUDY.quick, tmp_path) is None
    assert finished(STUDY, replace(STUDY.full, seed=1), tmp_path) is None


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_a_missing_file_is_not_finished(tmp_path: Path, name: str):
    run(STUDY, STUDY.full, tmp_path)
    (tmp_path / "sample" / name).unlink()
    assert finished(STUDY, STUDY.full, tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '[{"claim": 1}]'])
def test_broken_claims_are_not_finished(tmp_path: Path, text: str):
    run(STUDY, STUDY.full, tmp_path)
    (tmp_path / "sample" / "claims.json").write_text(text)
    assert not finished(STUDY, STUDY.full, tmp_path)


@pytest.mark.parametrize("part", ["compute", "draw", "claims"])
def test_a_failure_leaves_the_old_folder_whole(tmp_path: Path, part: str):
    def fail(*_arguments):
        raise RuntimeError("broken")

    run(STUDY, STUDY.full, tmp_path)
    before = contents(tmp_path / "sample")
    with pytest.raises(RuntimeError, match="broken"):
        run(replace(STUDY, **{part: fail}), replace(STUDY.full, seed=1), tmp_path)
    assert contents(tmp_path / "sample") == before
    assert [path.name for path in tmp_path.iterdir()] == ["sample"]


def test_a_figure_that_cannot_be_saved_leaves_the_old_folder_whole(tmp_path: Path):
    class Unsavable:
        def savefig(self, path, **_options):
            raise OSError(f"no space for {path}")

    run(STUDY, STUDY.full, tmp_path)
    before = contents(tmp_path / "sample")
    with pytest.raises(OSError, match="no space"):
        run(replace(STUDY, draw=lambda _frame: Unsavable()), replace(STUDY.full, seed=1), tmp_path)
    assert contents(tmp_path / "sample") == before
    assert [path.name for path in tmp_path.iterdir()] == ["sample"]


def test_verdicts():
    said = {"paper": "", "ours": "", "tolerance": ""}
    verdicts = [judge("x", **said, holds=holds).verdict for holds in (True, False, None)]
    assert verdicts == ["reproduced", "not reproduced", "not testable here"]


def test_configure_changes_what_there_is_and_refuses_the_rest():
    assert configure(STUDY, quick=True, seed=3) == Config(seed=3, trials=2)
    assert configure(STUDY, trials=9) == Config(trials=9)
    with pytest.raises(ValueError, match="at least 2 trials, got 1"):
        configure(STUDY, trials=1)
    with pytest.raises(ValueError, match="sample has no trials; it has seed"):
        configure(replace(STUDY, full=WithoutTrials()), trials=3)


def test_every_entry_of_the_catalogue_is_a_study_of_that_name():
    for name in ENTRIES:
        study = load(name)
        assert study.name == name
        assert study.full != study.quick
        assert study.full.seed == 0
    with pytest.raises(ValueError, match="did you mean yu2024-fig2"):
        load("yu2024-fig22")
