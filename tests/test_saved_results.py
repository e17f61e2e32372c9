"""What earlier versions have saved is read and gives what it gave; what later ones save is refused in one line."""

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

import depthscope
from depthscope.attention_paths import PathShares
from depthscope.cli.app import main
from depthscope.files import content_sum, read_json, require_format, write_json
from depthscope.report import read_metrics
from depthscope_lab.papers import load
from depthscope_lab.papers.study import earlier, run
from depthscope_lab.training.checkpoint import checkpoints_in, read_checkpoint

SAVED = Path(__file__).parent / "saved" / "0.1.0"
LATER = "a later version of depthscope wrote it"


def test_a_profile_gives_the_same_verdict():
    profile = depthscope.Profile.load(SAVED / "profile")
    assert (profile.depth, profile.metadata["model"]) == (6, "encoder")
    then, now = json.loads((SAVED / "verdict.json").read_text()), depthscope.diagnose(profile).to_dict()
    assert now["verdict"] == then["verdict"]  # its sentences are said in other words since
    assert now["numbers"] == pytest.approx(then["numbers"], rel=1e-12)  # the last bits are the order of additions
    numbers = {finding["rule"]: finding["numbers"] for finding in now["findings"]}
    shared = [finding for finding in then["findings"] if finding["rule"] in numbers]
    assert len(shared) >= 4
    for finding in shared:
        before, after = finding["numbers"], numbers[finding["rule"]]
        known = {name: before[name] for name in before.keys() & after.keys() if not isinstance(before[name], str)}
        assert {name: after[name] for name in known} == pytest.approx(known, rel=1e-12, nan_ok=True), finding["rule"]
    assert not now["recommendation"]["measured"]  # what trained best at about this depth, in place of an estimated τ
    assert now["recommendation"]["line"].startswith("depthscope.apply(model, ")


def test_a_profile_that_is_read_and_saved_again_is_the_same(tmp_path: Path):
    first = depthscope.Profile.load(SAVED / "profile")
    again = depthscope.Profile.load(first.save(tmp_path))
    assert again.metadata == first.metadata
    assert again.frame.equals(first.frame)
    assert again.sinks.equals(first.sinks)


def test_path_shares():
    shares = PathShares.load(SAVED / "paths")
    assert shares.counts == {0: 1, 1: 6, 2: 12, 3: 8}
    assert math.isclose(shares.summary()["projection_share"].sum(), 1, abs_tol=1e-6)


def test_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """From step 2 to step 4, to the numbers that it had then; another machine adds in another order."""
    shutil.copytree(SAVED / "run", tmp_path / "run")
    then = read_metrics(SAVED / "run" / "metrics.jsonl")
    size = ("--depth", "1", "--width", "8", "--set", "heads=1", "--set", "ffn_width=8", "--steps", "4", "--cpu")
    settings = ("tracker=none", "watch_every=0", "log_every=1")
    given = [word for setting in settings for word in ("--set", setting)]
    arguments = ["train", "vit-digits", *size, *given, "--out", str(tmp_path / "run"), "--resume"]
    monkeypatch.setattr(sys, "argv", ["depthscope", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0, capsys.readouterr().err
    now = read_metrics(tmp_path / "run" / "metrics.jsonl")
    losses, before = ([row["loss"] for row in rows if "loss" in row] for rows in (now, then))
    assert len(losses) == 4
    assert losses == pytest.approx(before, rel=1e-3)


def test_a_study_without_a_format_counts(tmp_path: Path):
    """0.1.0 wrote none."""
    study = load("yu2024-fig4")
    run(study, study.quick, tmp_path)
    place = tmp_path / study.name / "config.json"
    about = read_json(place)
    assert about.pop("format") == 1
    del about["kind"], about["sha256"]
    write_json(place, about)
    assert earlier(study, study.quick, tmp_path).claims is not None
    write_json(place, about | {"format": 99})
    assert LATER in earlier(study, study.quick, tmp_path).refused  # it is computed again, and says why


def renumber(path: Path, **sums: str) -> None:
    about = read_json(path) | {"format": 99}
    about.pop("sha256", None)
    write_json(path, about | ({"sha256": content_sum(about)} if sums else {}))


def test_a_profile_of_a_later_version(tmp_path: Path):
    shutil.copytree(SAVED / "profile", tmp_path / "later")
    renumber(tmp_path / "later" / "profile.json", sha256="")
    with pytest.raises(ValueError, match=f"expected format 1, got 99: {LATER}; update$"):
        depthscope.Profile.load(tmp_path / "later")


def test_path_shares_of_a_later_version(tmp_path: Path):
    shutil.copytree(SAVED / "paths", tmp_path / "later")
    renumber(tmp_path / "later" / "paths.json")
    with pytest.raises(ValueError, match=f"expected format 1, got 99: {LATER}"):
        PathShares.load(tmp_path / "later")


def test_a_checkpoint_of_a_later_version(tmp_path: Path):
    shutil.copytree(SAVED / "run", tmp_path / "later")
    (checkpoint,) = checkpoints_in(tmp_path / "later" / "checkpoints")
    assert read_checkpoint(checkpoint).step == 2
    renumber(checkpoint / "state.json", sha256="")
    with pytest.raises(ValueError, match=f"expected format 2, got 99: {LATER}"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize("found", [0, 3, "1", None, True, 1.0, [1]])
def test_what_is_no_format_is_refused(found: object):
    with pytest.raises(ValueError, match="expected format 1 or 2, got "):
        require_format(found, (2, 1))
    assert require_format(2, (1, 2)) == 2
