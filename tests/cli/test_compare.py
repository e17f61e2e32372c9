"""`depthscope compare` as a user meets it."""

import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from depthscope.cli.app import main

SETTINGS = ("--set", "heads=1", "--set", "ffn_width=8", "--set", "log_every=1")
SMALL = ("vit-digits", "--width", "8", "--steps", "2", *SETTINGS, "--cpu")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The program in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["depthscope", "compare", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_curves_a_table_and_a_summary(run, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    arguments = (*SMALL, "--variants", "pre,deescalated", "--depths", "2", "--seeds", "1", "--jobs", "2")
    code, out, _err = run(*arguments, "--out", str(tmp_path))
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == [
        "variant",
        "blocks",
        "lr",
        "warm-up",
        "runs",
        "loss",
        "test",
        "loss",
        "test",
        "accuracy",
    ]
    assert lines[1].split()[:5] == ["pre", "2", "0.001", "0", "1"]
    assert lines[2].split()[:5] == ["deescalated", "2", "0.0001", "0", "1"]
    files = {path.name for path in tmp_path.iterdir()}
    results = {"curves.parquet", "curves.png", "curves.pdf", "summary.json"}
    assert files == {"runs", "commands.json", "report.html", *results}
    summary = json.loads((tmp_path / "summary.json").read_text())
    frame = pd.read_parquet(tmp_path / "curves.parquet")
    assert set(frame["variant"]) == {"pre", "deescalated"}
    last = frame[(frame["variant"] == "pre") & (frame["quantity"] == "test_loss")]["value"].iloc[-1]
    assert summary["cells"][0]["test_loss"] == last
    assert f"{last:.3f}" in lines[1]

    code, out, _err = run(*arguments, "--out", str(tmp_path), "--json")  # nothing is trained again
    assert code == 0
    assert json.loads(out) == summary


def test_a_dry_run_lists_the_runs_and_starts_none(run, tmp_path: Path):
    out = tmp_path / "new"
    arguments = ("vit-digits", "--depths", "12,24", "--seeds", "2", "--warmup", "0,100", "--lr-grid", "1,3", "--json")
    code, printed, _err = run(*arguments, "--batch-size", "32", "--dry-run", "--out", str(out))
    assert code == 0
    runs = {name: run["config"] for name, run in json.loads(printed)["plan"].items()}
    assert len(runs) == 3 * 2 * 2 * 2 * 2
    assert runs["post-depth12-lr0.00015-warmup100-seed1"]["batch_size"] == 32
    assert not out.exists()


def test_composed_variants_are_compared_and_have_folders_of_their_own(run, tmp_path: Path):
    variants = "post, deescalated(tau=0.5,at=input), post+residual-weight(alpha=0.5)@xavier"
    code, printed, _err = run("vit-digits", "--variants", variants, "--seeds", "1", "--dry-run", "--json")
    assert code == 0
    runs = {name: run["config"] for name, run in json.loads(printed)["plan"].items()}
    assert list(runs) == [
        "post-depth48-lr5e-05-warmup0-seed0",
        "deescalated_at=input_tau=0.5-depth48-lr0.0001-warmup0-seed0",
        "post+residual-weight_alpha=0.5_@xavier-depth48-lr5e-05-warmup0-seed0",
    ]
    assert [row["initialiser"] for row in runs.values()] == ["pytorch_default", "pytorch_default", "xavier"]
    code, out, _err = run(*SMALL, "--variants", variants, "--depths", "2", "--seeds", "1", "--out", str(tmp_path))
    assert code == 0
    assert "deescalated(at=input, tau=0.5)" in out
    assert set(pd.read_parquet(tmp_path / "curves.parquet")["variant"]) == {row["variant"] for row in runs.values()}


def test_interrupted_it_says_how_to_go_on(run, tmp_path: Path, monkeypatch):
    def interrupt(*_a, **_k):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthscope.cli.compare.run_cells", interrupt)
    code, _out, err = run(*SMALL, "--depths", "1", "--out", str(tmp_path))
    assert code == 130
    assert err == f"depthscope: interrupted; the runs in {tmp_path} are saved, and the same command goes on\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit-digit"], "did you mean 'vit-digits'"),
        (["vit-digits", "--variants", "post,per"], "unknown variant 'per': did you mean 'pre'?"),
        (["vit-digits", "--variants", ","], "expected --variants to be some of post, pre, deescalated"),
        (["vit-digits", "--depths", "1.5"], "expected --depths to be whole numbers separated by commas, got '1.5'"),
        (["vit-digits", "--depths", "0"], "expected depth greater than 0, got 0"),
        (["vit-digits", "--lr-grid", ","], "expected --lr-grid to be at least one number"),
        (["vit-digits", "--seed", "3"], "--seed"),
        (
            ["vit-digits", "--seeds", "10000000000"],
            "at most 10000 runs, got 10000000000 seeds × 3 others = 30000000000",
        ),
        (["vit-digits", "--width", "999999996", "--out", "OUT"], "width 999999996"),
        (["vit-digits", "--lr-grid", "1e300"], "expected lr of at most 3.4e+37"),
        (["vit-digits", "--set", "seed=3"], "seed is compared here: give --seeds instead"),
        (["vit-digits", "--set", "warmup_steps=3"], "give --warmup instead"),
        (["vit-digits", "--variants", "post,deescalated(tau=7)", "--out", "OUT"], "expected tau in [0, 1], got 7"),
        (["vit-digits", "--set", "heads=5", "--out", "OUT"], "heads that divide the width"),
        (["vit-digits", "--depths", "100000000", "--out", "OUT"], "fits into memory"),
        (["vit-digits", "--data", "folder", "--out", "OUT"], "brings its data"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_trained(run, tmp_path: Path, arguments: list[str], message: str):
    code, _out, err = run(*[str(tmp_path / "out") if part == "OUT" else part for part in arguments])
    assert code == 2
    assert message in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("depthscope: ")
    assert not (tmp_path / "out" / "runs").exists()
