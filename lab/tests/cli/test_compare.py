"""`depthscope compare` as a user meets it."""

import json
import re
import sys
from pathlib import Path

import jsonschema
import pandas as pd
import pytest

from depthscope.cli.app import main
from depthscope.cli.documents import schema_of
from depthscope.sealed import read_record
from depthscope_lab.training import protocol
from depthscope_lab.training.comparison import Cell
from depthscope_lab.training.recipes import RECIPES
from pretended_runs import pretend

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
    results = {"curves.parquet", "curves.png", "summary.json"}
    assert files == {"runs", "commands.json", "report.html", *results}
    assert not list((tmp_path / "runs").glob("*/report.html"))  # one page for all of them
    summary = read_record(tmp_path / "summary.json", "comparison").content
    frame = pd.read_parquet(tmp_path / "curves.parquet")
    assert set(frame["variant"]) == {"pre", "deescalated"}
    last = frame[(frame["variant"] == "pre") & (frame["quantity"] == "test_loss")]["value"].iloc[-1]
    assert summary["cells"][0]["test_loss"] == last
    assert f"{last:.3f}" in lines[1]

    code, out, _err = run(*arguments, "--out", str(tmp_path), "--json")  # nothing is trained again
    assert code == 0
    assert json.loads(out) == read_record(tmp_path / "summary.json", "comparison").content


def test_a_dry_run_lists_the_runs_and_starts_none(run, tmp_path: Path):
    out = tmp_path / "new"
    arguments = ("vit-digits", "--depths", "12,24", "--seeds", "2", "--lr-grid", "1,3", "--json")
    code, printed, _err = run(*arguments, "--batch-size", "32", "--dry-run", "--out", str(out))
    assert code == 0
    runs = {name: run["config"] for name, run in json.loads(printed)["plan"].items()}
    assert len(runs) == 3 * 2 * 2 * 2
    assert runs["post-depth12-lr0.00015-warmup0-seed1"]["batch_size"] == 32
    assert not out.exists()


def test_composed_variants_are_compared_and_have_folders_of_their_own(run, trained_here, tmp_path: Path):
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
    composed = variants.removeprefix("post, ")
    code, out, _err = run(*SMALL, "--variants", composed, "--depths", "2", "--seeds", "1", "--out", str(tmp_path))
    assert code == 0
    assert "deescalated(at=input, tau=0.5)" in out
    named = {row["variant"] for row in runs.values()} - {"post"}
    assert set(pd.read_parquet(tmp_path / "curves.parquet")["variant"]) == named


def test_interrupted_it_says_how_to_go_on(run, tmp_path: Path, monkeypatch):
    def interrupt(*_a, **_k):
        raise KeyboardInterrupt

    monkeypatch.setattr("depthscope_lab.cli.compare.run_cells", interrupt)
    code, _out, err = run(*SMALL, "--depths", "1", "--out", str(tmp_path))
    assert code == 130
    assert err == f"depthscope: interrupted; the runs in {tmp_path} are saved, and the same command goes on\n"


TUNED = (*SMALL, "--variants", "post,pre", "--depths", "1,2", "--tune")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The runs that a fair comparison asks for; none happens."""
    found: list[Cell] = []
    monkeypatch.setattr(protocol, "run_cells", pretend(found, {"post": 5e-5, "pre": 1e-2}))
    return found


def test_a_fair_comparison_says_its_plan_first_and_its_verdict_last(run, tmp_path: Path, asked, monkeypatch):
    monkeypatch.setenv("COLUMNS", "180")
    code, out, _err = run(*TUNED, "--seeds", "8", "--out", str(tmp_path))
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("vit-digits: 2 variants (post, pre), 1, 2 blocks; each run 2 steps, batch 64; 1 run")
    assert "1. Choosing rates on validation data: 3 each (×0.3, ×1, ×3 of its own), seed 0: 12 runs" in out
    assert "2. Measuring on test data: 8 fresh seeds each at the chosen rate: 32 runs." in out
    assert re.search(r"pre +1 +0\.009", out)  # found beyond the grid, and inside of what was tried then
    said = "2 blocks: not better than post with 1 blocks (1.045): post (1.045), pre (1.150)."  # depth changes nothing
    assert said in out
    assert {path.name for path in tmp_path.iterdir()} >= {"summary.json", "curves.png", "report.html"}
    assert said in (tmp_path / "report.html").read_text(encoding="utf-8")
    summary = read_record(tmp_path / "summary.json", "comparison").content
    ranks = {(cell["depth"], cell["rank"]) for cell in summary["cells"]}
    assert ranks == {(1, "baseline"), (2, "not learned")}

    code, out, err = run(*TUNED, "--seeds", "8", "--out", str(tmp_path), "--json")
    assert code == 0
    found = json.loads(out)
    jsonschema.validate(found, schema_of("compare"))
    assert found == read_record(tmp_path / "summary.json", "comparison").content
    assert "8 fresh seeds" in err


def test_three_seeds_claim_no_ranking(run, tmp_path: Path, asked):
    code, out, _err = run(*TUNED, "--out", str(tmp_path))
    assert code == 0
    assert "No ranking is claimed: 3 seeds" in out


def test_a_plan_that_is_only_looked_at_leaves_nothing(run, tmp_path: Path, asked):
    out = tmp_path / "new"
    code, printed, _err = run(*TUNED, "--dry-run", "--json", "--out", str(out))
    assert code == 0
    found = json.loads(printed)
    jsonschema.validate(found, schema_of("compare"))
    assert len(found["plan"]) == 12
    assert {entry["config"]["evaluate_on"] for entry in found["plan"].values()} == {"validation"}
    code, printed, _err = run(*TUNED, "--dry-run", "--out", str(out))
    assert printed.splitlines()[-1] == "nothing was trained"
    assert not asked
    assert not out.exists()


def test_all_variants_are_those_that_the_recipe_can_build(run, tmp_path: Path):
    arguments = ("--variants", "all", "--seeds", "1", "--set", "heads=4", "--dry-run", "--json", "--cpu")
    code, printed, err = run(*arguments, "--out", str(tmp_path))  # and digits are the default
    assert code == 0
    plan = json.loads(printed)
    assert plan["recipe"] == "vit-digits"
    built = [entry["config"]["variant"] for entry in plan["plan"].values()]
    left_out = [line.split()[1] for line in err.splitlines() if "is left out" in line]
    assert {*built, *left_out} == set(RECIPES["vit-digits"].variants)
    assert {"post", "pre", "deescalated"} <= set(built)


def test_all_can_stand_among_other_variants_and_is_what_the_least_depth_can_have(run, tmp_path: Path):
    arguments = ("--variants", "all,deescalated(tau=0.5)", "--depths", "1", "--seeds", "1", "--dry-run", "--json")
    code, printed, _err = run(*arguments, "--cpu", "--out", str(tmp_path))
    assert code == 0
    built = [entry["config"]["variant"] for entry in json.loads(printed)["plan"].values()]
    assert {"post", "deescalated", "deescalated(tau=0.5)"} <= set(built)


@pytest.mark.parametrize(
    ("variant", "said"),
    [("post+nonsense", "unknown remedy 'nonsense'"), ("deescalated(tau=7)", "expected tau in [0, 1], got 7")],
)
def test_a_dry_run_refuses_remedies_that_do_not_exist(run, tmp_path: Path, variant: str, said: str):
    code, _out, err = run(*SMALL, "--variants", variant, "--dry-run", "--out", str(tmp_path))
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_one_is_not_called_several(run, tmp_path: Path, asked):
    arguments = (*SMALL, "--variants", "post", "--depths", "1", "--tune", "--dry-run", "--out", str(tmp_path))
    out = run(*arguments)[1]
    assert "1 variant (post), 1 block;" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit-digits", "--tune", "--seeds", "2"], "at least 3 seeds"),
        (["vit-digits", "--tune", "--lr-grid", "1"], "at least 2 rates"),
        (["vit-digits", "--tune", "--seeds", "1000000000"], "at most 10000 seeds, as each is a run, got 1000000000"),
        (["vit-digits", "--tune", "--set", "evaluate_on=test"], "leave evaluate_on out"),
        (["vit-digit"], "did you mean 'vit-digits'"),
        (["vit-digits", "--variants", "post,pree"], "unknown variant 'pree': did you mean 'pre'?"),
        (["vit-digits", "--variants", ","], "expected --variants to be some of post, pre, deescalated"),
        (["vit-digits", "--depths", "1.5"], "expected --depths to be whole numbers separated by commas, got '1.5'"),
        (["vit-digits", "--depths", "0"], "expected depth greater than 0, got 0"),
        (["vit-digits", "--lr-grid", ","], "expected --lr-grid to be numbers separated by commas, got ','"),
        (["vit-digits", "--seed", "3"], "--seed"),
        (
            ["vit-digits", "--seeds", "10000000000"],
            "at most 10000 runs, got 10000000000 seeds × 3 others = 30000000000",
        ),
        (["vit-digits", "--width", "999999996", "--out", "OUT"], "width 999999996"),
        (["vit-digits", "--lr-grid", "1e300"], "expected lr of at most 3.4e+37"),
        (["vit-digits", "--set", "seed=3"], "seed is compared here: give --seeds instead"),
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
