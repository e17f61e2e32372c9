"""`depthscope reproduce`: what it lists, runs, writes, skips, refuses, and how it ends."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from matplotlib.figure import Figure

from depthscope.cli.app import main
from depthscope_lab.papers import STUDIES, Entry
from depthscope_lab.papers.study import FILES, Study, judge
from warm import run_warm


@dataclass(frozen=True)
class Config:
    seed: int = 0
    trials: int = 4


@dataclass(frozen=True)
class WithoutTrials:
    seed: int = 0


class Fakes:
    """Three studies in place of the catalogue's: one that holds, one that does not, one without trials."""

    def __init__(self) -> None:
        self.computed: list[tuple[str, object]] = []
        self.interrupt = ""

    def study(self, name: str, config: type, holds: bool | None) -> Study:
        def compute(config, progress):
            if name == self.interrupt:
                raise KeyboardInterrupt
            self.computed.append((name, config))
            print("a library that prints")
            progress(1.0)
            return pd.DataFrame({"x": [1.0]})

        def claims(_frame, _config):
            said = {"paper": "§[1]", "ours": "1.0", "tolerance": "none"}
            return [
                judge(f"{name} holds", **said, holds=holds),
                judge("nobody can tell", **said, holds=None, note="needs a larger machine"),
            ]

        quick = Config(trials=2) if config is Config else WithoutTrials(seed=5)
        return Study(name, config(), quick, compute, lambda _frame: Figure(), claims)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fakes]:
    made = Fakes()
    kinds = {"good": (Config, True), "bad": (Config, False), "plain": (WithoutTrials, True)}
    ours = {name: (STUDIES[name], STUDIES.owner(name)) for name in STUDIES}
    for name in ours:
        STUDIES.unregister(name)
    for name, (config, holds) in kinds.items():
        module = ModuleType(name)
        module.STUDY = made.study(name, config, holds)
        monkeypatch.setitem(sys.modules, f"fake_{name}", module)
        STUDIES.register(Entry(name, f"fake_{name}", f"what {name} shows", "1 s"))
    monkeypatch.setenv("COLUMNS", "200")
    yield made
    for name in kinds:
        STUDIES.unregister(name)
    for entry, owner in ours.values():
        STUDIES.register(entry, owner=owner)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs the command in this process; gives (stdout, stderr)."""

    def call(*arguments: str, code: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["depthscope", "reproduce", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert ended.value.code == code, captured.err
        return captured.out, captured.err

    return call


def test_alone_it_lists_the_studies_and_imports_nothing_heavy():
    code = (
        "import sys; sys.argv = ['depthscope', 'reproduce']\n"
        "from depthscope.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'pandas', 'pyarrow', 'transformers', 'matplotlib'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name in STUDIES:
        assert name in result.stdout


def test_the_list_as_json(run):
    listed = json.loads(run("--json")[0])
    listed = listed["available"]
    assert listed.keys() == STUDIES.keys()
    assert listed["yu2024-fig1"]["title"] == STUDIES["yu2024-fig1"].title


def test_a_real_study_in_its_quick_form(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = run("yu2024-fig4", "--quick", "--out", str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new" / "yu2024-fig4").iterdir()} == {*FILES, "commands.json"}
    assert "similarity keeps rising" in out
    assert "not testable here" in out
    assert str(tmp_path / "new") in out.replace("\n", "")
    assert err == ""  # no progress bar outside a terminal


def test_the_table_has_claim_paper_ours_and_verdict(run, fakes: Fakes, tmp_path: Path):
    out, _ = run("good", "bad", "--out", str(tmp_path))
    for part in ("good holds", "§[1]", "1.0", "reproduced", "needs a larger machine", "1 not reproduced"):
        assert part in out
    assert [name for name, _ in fakes.computed] == ["good", "bad"]


def test_the_default_folder(run, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    out, _ = run("good")
    assert "results are in depthscope-studies" in out
    assert (tmp_path / "depthscope-studies" / "good" / "claims.json").exists()


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 3), ("all", 3)])
def test_strict_ends_with_3_if_a_claim_is_not_reproduced(run, fakes: Fakes, tmp_path: Path, name: str, code: int):
    """What is not testable here does not count."""
    _, err = run(name, "--strict", "--out", str(tmp_path), code=code)
    assert ("depthscope: 1 claim not reproduced" in err) == bool(code)
    run(name, "--out", str(tmp_path))


def test_json_is_one_object_and_nothing_else(run, fakes: Fakes, tmp_path: Path):
    out, err = run("good", "bad", "--json", "--strict", "--out", str(tmp_path), code=3)
    assert json.loads(out)["out"] == str(tmp_path)
    found = {name: study["claims"] for name, study in json.loads(out)["studies"].items()}
    assert list(found) == ["good", "bad"]
    assert [claim["verdict"] for claim in found["bad"]] == ["not reproduced", "not testable here"]
    assert found["good"] == json.loads((tmp_path / "good" / "claims.json").read_text())
    assert "a library that prints" in err


def test_what_is_there_is_not_computed_again(run, fakes: Fakes, tmp_path: Path):
    run("good", "--out", str(tmp_path))
    out, _ = run("all", "--out", str(tmp_path))
    assert "good: already there, same configuration, code and data" in out
    assert "good holds" in out
    assert [name for name, _ in fakes.computed] == ["good", "bad", "plain"]
    assert "computed again" not in out
    out, _ = run("good", "--seed", "1", "--out", str(tmp_path))
    assert "already there" not in out
    assert "good: computed again: the earlier run had another configuration (seed was 0 and is 1)" in out
    out, _ = run("good", "--seed", "1", "--again", "--out", str(tmp_path))
    assert "already there" not in out
    assert "good: computed again: --again was given" in out


def test_what_other_code_computed_is_computed_again_and_one_line_says_why(
    run, fakes: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run("good", "--out", str(tmp_path))
    monkeypatch.setattr("depthscope_lab.papers.provenance.code_hash", lambda _compute: "another")
    out, _ = run("good", "--out", str(tmp_path))
    assert "good: computed again: the code has changed\n" in out
    assert [name for name, _ in fakes.computed] == ["good", "good"]
    assert "already there" in run("good", "--out", str(tmp_path))[0]


def test_an_interrupted_run_keeps_what_is_finished_and_goes_on_from_there(run, fakes: Fakes, tmp_path: Path):
    fakes.interrupt = "bad"
    _, err = run("all", "--out", str(tmp_path), code=130)
    assert err.startswith(f"depthscope: interrupted; 1 of 3 studies are in {tmp_path}")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    fakes.interrupt = ""
    out, _ = run("all", "--out", str(tmp_path))
    assert "good: already there" in out
    assert [name for name, _ in fakes.computed] == ["good", "bad", "plain"]


def test_options_reach_the_configuration(run, fakes: Fakes, tmp_path: Path):
    run("good", "--quick", "--seed", "7", "--out", str(tmp_path))
    run("good", "--trials", "9", "--out", str(tmp_path))
    assert fakes.computed == [("good", Config(7, 2)), ("good", Config(0, 9))]


def test_trials_with_all_leave_a_study_without_trials_as_it_is(run, fakes: Fakes, tmp_path: Path):
    out, _ = run("all", "--trials", "9", "--out", str(tmp_path))
    assert "--trials does not concern plain" in out
    assert dict(fakes.computed) == {"good": Config(0, 9), "bad": Config(0, 9), "plain": WithoutTrials()}


def test_data_and_scale_with_all_concern_the_studies_that_have_them(run, fakes: Fakes, tmp_path: Path):
    out, _ = run("all", "--data", "folder", "--scale", "paper", "--out", str(tmp_path))
    assert "--data does not concern good, bad, plain" in out
    assert "--scale does not concern good, bad, plain" in out
    assert len(fakes.computed) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plain", "--trials", "9"], "plain has no trials"),
        (["good", "plain", "--trials", "9"], "plain has no trials"),
        (["plain", "--data", "folder"], "plain has no data; it has seed"),
        (["plain", "--scale", "paper"], "plain has no scale 'paper'; scales: none"),
        (["--data", "folder"], "expected a study, or all"),
        (["goood"], "unknown study 'goood': did you mean 'good'? expected all or some of good, bad, plain"),
        (["good", "--trials", "1"], "expected a whole number from 2 to"),
        (["--quick"], "expected a study, or all"),
        (["good", "--out", "/dev/null/x"], "expected a folder that can be written for --out, got '/dev/null/x'"),
    ],
)
def test_a_mistake_ends_in_one_line_before_anything_is_computed(
    run, fakes: Fakes, tmp_path: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    _, err = run(*arguments, code=2)
    assert message in err
    assert err.startswith("depthscope: ")
    assert err.count("\n") == 1
    assert fakes.computed == []


PLUGIN_ENTRY = """
from depthscope_lab.papers import Entry

ENTRY = Entry("their-study", "their_package.their_study", "what another laboratory saw", "1 s")
"""
PLUGIN_STUDY = """
from dataclasses import dataclass
import pandas as pd
from depthscope import drawing
from depthscope_lab.papers.study import Study, judge

@dataclass(frozen=True)
class Config:
    seed: int = 0

def compute(config, progress):
    progress(1.0)
    return pd.DataFrame({"block": [1, 2, 3], "value": [0.1, 0.2, 0.3]})

def draw(frame):
    figure, (ax,) = drawing.panels(1)
    drawing.line_with_band(ax, frame["block"], frame["value"], colour=drawing.BLUE, name="theirs")
    return figure

def claims(frame, config):
    rises = bool(frame["value"].is_monotonic_increasing)
    return [judge("their curve rises", paper="p. 1", ours="0.1 to 0.3", tolerance="none", holds=rises)]

STUDY = Study("their-study", Config(), Config(seed=1), compute, draw, claims)
"""


@pytest.fixture
def plugged(tmp_path: Path):
    """Installs a package that offers a study, and runs the command where it is seen; gives the process."""
    site, package = tmp_path / "site", tmp_path / "site" / "their_package"
    package.mkdir(parents=True)
    for name, text in (("__init__", ""), ("entry", PLUGIN_ENTRY), ("their_study", PLUGIN_STUDY)):
        (package / f"{name}.py").write_text(text)
    about = site / "their_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[depthscope.studies]\ntheirs = their_package.entry:ENTRY\n")

    def call(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
        done = run_warm("-m", "depthscope", "reproduce", *arguments, env=environment, cwd=tmp_path)
        assert done.returncode == code, done.stderr
        return done

    return call


def test_a_study_of_another_package_is_listed_and_computed(plugged, tmp_path: Path):
    assert "what another laboratory saw" in plugged().stdout
    assert "their curve rises" in plugged("their-study", "--out", "new").stdout
    assert {path.name for path in (tmp_path / "new" / "their-study").iterdir()} == {*FILES, "commands.json"}
    assert "already there" in plugged("their-study", "--out", "new").stdout
    study = tmp_path / "site" / "their_package" / "their_study.py"
    study.write_text(study.read_text().replace("0.3]", "0.15]"))
    again = plugged("their-study", "--strict", "--out", "new", code=3).stdout
    assert "their-study: computed again: the code has changed" in again


def test_a_study_of_another_package_with_the_name_of_ours_is_refused_by_name(plugged, tmp_path: Path):
    entry = tmp_path / "site" / "their_package" / "entry.py"
    entry.write_text(entry.read_text().replace("their-study", "yu2024-fig2"))
    error = plugged(code=2).stderr
    assert "'yu2024-fig2' exists twice: one of depthscope, one of their-package" in error
