"""`depthscope reproduce`: what it lists, runs, writes, skips, refuses, and how it ends."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from matplotlib.figure import Figure

from depthscope.cli import main
from depthscope.studies import ENTRIES, Entry
from depthscope.studies.study import FILES, Study, judge


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
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    made = Fakes()
    kinds = {"good": (Config, True), "bad": (Config, False), "plain": (WithoutTrials, True)}
    for name in list(ENTRIES):
        monkeypatch.delitem(ENTRIES, name)
    for name, (config, holds) in kinds.items():
        module = ModuleType(name)
        module.STUDY = made.study(name, config, holds)
        monkeypatch.setitem(sys.modules, f"depthscope.studies.fake_{name}", module)
        monkeypatch.setitem(ENTRIES, name, Entry(f"fake_{name}", f"what {name} shows", "1 s"))
    monkeypatch.setenv("COLUMNS", "200")
    return made


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
    for name in ENTRIES:
        assert name in result.stdout


def test_the_list_as_json(run):
    listed = json.loads(run("--json")[0])
    assert listed.keys() == ENTRIES.keys()
    assert listed["yu2024-fig1"]["title"] == ENTRIES["yu2024-fig1"].title


def test_a_real_study_in_its_quick_form(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    out, err = run("yu2024-fig4", "--quick", "--out", str(tmp_path / "new"))
    assert {path.name for path in (tmp_path / "new" / "yu2024-fig4").iterdir()} == set(FILES)
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


@pytest.mark.parametrize(("name", "code"), [("good", 0), ("bad", 1), ("all", 1)])
def test_strict_ends_with_1_if_a_claim_is_not_reproduced(run, fakes: Fakes, tmp_path: Path, name: str, code: int):
    """What is not testable here does not count."""
    _, err = run(name, "--strict", "--out", str(tmp_path), code=code)
    assert ("depthscope: 1 claim not reproduced" in err) == bool(code)
    run(name, "--out", str(tmp_path))


def test_json_is_one_object_and_nothing_else(run, fakes: Fakes, tmp_path: Path):
    out, err = run("good", "bad", "--json", "--strict", "--out", str(tmp_path), code=1)
    found = json.loads(out)
    assert list(found) == ["good", "bad"]
    assert [claim["verdict"] for claim in found["bad"]] == ["not reproduced", "not testable here"]
    assert found["good"] == json.loads((tmp_path / "good" / "claims.json").read_text())
    assert "a library that prints" in err


def test_what_is_there_is_not_computed_again(run, fakes: Fakes, tmp_path: Path):
    run("good", "--out", str(tmp_path))
    out, _ = run("all", "--out", str(tmp_path))
    assert "good: already there, same configuration" in out
    assert "good holds" in out
    assert [name for name, _ in fakes.computed] == ["good", "bad", "plain"]
    assert "already there" not in run("good", "--seed", "1", "--out", str(tmp_path))[0]
    assert "already there" not in run("good", "--seed", "1", "--again", "--out", str(tmp_path))[0]


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
        (["good", "--trials", "1"], "greater than or equal to 2"),
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
