"""A study's folder is complete or as it was, and an earlier run counts only for its own configuration."""

import ast
import json
import runpy
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

import depthscope
import depthscope_lab
from depthscope.locks import owned
from depthscope_lab.papers import STUDIES, Entry, load, provenance
from depthscope_lab.papers.study import FILES, Study, configure, earlier, judge, run

SOURCE = Path(depthscope_lab.__file__).parent


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
    assert list(claim) == ["claim", "paper", "ours", "tolerance", "verdict", "note", "kind"]
    assert claim["verdict"] == found[0].verdict == "reproduced"
    config = json.loads((folder / "config.json").read_text())
    assert (config.pop("kind"), config.pop("format")) == ("study", 1)
    assert len(config.pop("sha256")) == 64
    assert config.pop("title") == ""  # it is in no catalogue
    assert config.pop("files").keys() == set(FILES) - {"config.json"}
    made_with = config.pop("made_with")
    assert list(made_with) == ["code", "libraries", "data"]
    assert len(made_with["code"]) == 64
    assert made_with["libraries"].keys() >= {"python", "torch", "numpy"}
    assert config == {"study": "sample", "seed": 0, "trials": 4, "levels": [0.5, 1.0]}


def test_finished_knows_its_own_configuration_only(tmp_path: Path):
    assert earlier(STUDY, STUDY.full, tmp_path).claims is None
    made = run(STUDY, STUDY.full, tmp_path)
    assert earlier(STUDY, STUDY.full, tmp_path).claims == made
    assert earlier(STUDY, STUDY.quick, tmp_path).claims is None
    assert earlier(STUDY, replace(STUDY.full, seed=1), tmp_path).claims is None


@pytest.mark.parametrize("name", FILES)
def test_a_folder_with_a_missing_file_is_not_finished(tmp_path: Path, name: str):
    run(STUDY, STUDY.full, tmp_path)
    (tmp_path / "sample" / name).unlink()
    assert earlier(STUDY, STUDY.full, tmp_path).claims is None


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize("where", [0, 0.5, -1])
def test_a_folder_with_a_damaged_file_is_not_finished_and_says_which(tmp_path: Path, name: str, where: float):
    run(STUDY, STUDY.full, tmp_path)
    path = tmp_path / "sample" / name
    content = bytearray(path.read_bytes())
    content[int(where * len(content)) if where > 0 else int(where)] ^= 1
    path.write_bytes(content)
    there = earlier(STUDY, STUDY.full, tmp_path)
    assert there.claims is None
    assert name in there.refused
    run(STUDY, STUDY.full, tmp_path)
    assert earlier(STUDY, STUDY.full, tmp_path).claims is not None


def test_a_study_that_is_being_computed_is_not_computed_by_another_process_too(tmp_path: Path):
    with owned(tmp_path / "sample"), pytest.raises(ValueError, match="sample' is in use by process"):
        run(STUDY, STUDY.full, tmp_path)


def test_more_trials_than_anybody_waits_for_are_refused_at_once():
    assert configure(STUDY, trials=400, quick=True).trials == 400
    with pytest.raises(ValueError, match="sample: expected at most 400 trials, 100 times its own 4, got 1000000000"):
        configure(STUDY, trials=10**9, quick=True)


@pytest.mark.parametrize("text", ["{", "[]", '[{"claim": 1}]'])
def test_broken_claims_are_not_finished(tmp_path: Path, text: str):
    run(STUDY, STUDY.full, tmp_path)
    (tmp_path / "sample" / "claims.json").write_text(text)
    assert earlier(STUDY, STUDY.full, tmp_path).claims is None


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
    for name in STUDIES:
        study = load(name)
        assert study.name == name
        assert study.full != study.quick
        assert study.full.seed == 0
    with pytest.raises(ValueError, match="did you mean 'yu2024-fig2'"):
        load("yu2024-fig22")


@dataclass(frozen=True)
class WithData:
    data: str | None = None
    seed: int = 0
    trials: int = 4


GIVEN_DATA = replace(STUDY, full=WithData(), quick=WithData(trials=2))


def test_nothing_earlier_is_no_reason(tmp_path: Path):
    assert earlier(STUDY, STUDY.full, tmp_path).refused == ""
    run(STUDY, STUDY.full, tmp_path)
    assert earlier(STUDY, STUDY.full, tmp_path).refused == ""
    assert "trials was 4 and is 2" in earlier(STUDY, STUDY.quick, tmp_path).refused
    (tmp_path / "sample" / "figure.pdf").unlink()
    assert earlier(STUDY, STUDY.full, tmp_path).refused == "figure.pdf is missing"


def test_another_version_of_the_code_does_not_pass_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A copy of both packages, in which single files are edited: what computes counts, what shows does not."""
    for package in (depthscope, depthscope_lab):
        house = tmp_path / package.__name__
        shutil.copytree(Path(package.__file__).parent, house, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__file__", str(house / "__init__.py"))
    out = tmp_path / "out"
    made = run(STUDY, STUDY.full, out)
    for shown in ("depthscope/cli/probe.py", "depthscope/drawing/palette.py", "depthscope_lab/cli/reproduce.py"):
        (tmp_path / shown).write_text("# edited\n")
        assert earlier(STUDY, STUDY.full, out).claims == made
    for computing in ("depthscope/measures/tokens.py", "depthscope_lab/papers/yu2024/fig4.py", "depthscope/files.py"):
        before = (tmp_path / computing).read_text()
        (tmp_path / computing).write_text(before + "\n")
        assert earlier(STUDY, STUDY.full, out).refused == "the code has changed"
        (tmp_path / computing).write_text(before)
        assert earlier(STUDY, STUDY.full, out).claims == made


def test_other_data_does_not_pass_as_finished(tmp_path: Path):
    data, out = tmp_path / "data", tmp_path / "out"
    (data / "deep").mkdir(parents=True)
    (data / "deep" / "train.txt").write_text("one two three")
    config = configure(GIVEN_DATA, data=str(data))
    made = run(GIVEN_DATA, config, out)
    assert earlier(GIVEN_DATA, config, out).claims == made
    (data / "deep" / "train.txt").write_text("one two trees")  # of the same length
    assert earlier(GIVEN_DATA, config, out).refused == f"the data in {data} have changed"
    (data / "deep" / "train.txt").write_text("one two three")
    assert earlier(GIVEN_DATA, config, out).claims == made
    (data / "deep" / "train.txt").rename(data / "train.txt")
    assert earlier(GIVEN_DATA, config, out).claims is None


def test_another_library_and_a_run_of_unknown_code_do_not_pass_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run(STUDY, STUDY.full, tmp_path)
    path = tmp_path / "sample" / "config.json"
    with monkeypatch.context() as patched:
        versions = provenance.library_versions() | {"torch": "1.0"}
        patched.setattr(provenance, "library_versions", lambda: versions)
        assert earlier(STUDY, STUDY.full, tmp_path).refused.endswith("and is 1.0")
    config = json.loads(path.read_text())
    del config["made_with"], config["kind"], config["sha256"]  # as earlier versions wrote it
    path.write_text(json.dumps(config))
    assert earlier(STUDY, STUDY.full, tmp_path).refused == "nothing says which code computed the earlier run"


def test_what_was_trained_by_other_code_is_not_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folders: list[Path] = []

    def trained(config, progress, folder):
        folders.append(folder)
        return compute(config, progress)

    study = replace(STUDY, compute=trained, in_folder=True)
    for code in ("one", "one", "another"):
        monkeypatch.setattr(provenance, "code_hash", lambda _compute, code=code: code)
        run(study, study.full, tmp_path)
    assert folders[0] == folders[1] != folders[2]
    assert all(folder.parent == tmp_path / "sample" for folder in folders)


def test_an_entry_must_name_its_study(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(STUDIES, "_things", dict(STUDIES._things))
    monkeypatch.setattr(STUDIES, "_owners", dict(STUDIES._owners))
    with pytest.raises(ValueError, match="'yu2024-fig2' exists twice: one of depthscope, one of elsewhere"):
        STUDIES.register(Entry("yu2024-fig2", "elsewhere", "", ""), owner="elsewhere")
    with pytest.raises(ValueError, match="a study cannot be called 'all'"):
        STUDIES.register(Entry("all", "elsewhere", "", ""))
    with pytest.raises(ValueError, match=r"expected a depthscope_lab\.papers\.Entry"):
        STUDIES.register("yu2024-fig9")
    STUDIES.register(Entry("lost", "json", "", ""), owner="elsewhere")
    with pytest.raises(ValueError, match="expected a STUDY called 'lost' in json, of elsewhere; there is none"):
        load("lost")
    STUDIES.register(Entry("broken", "no_such_module", "", ""), owner="elsewhere")
    with pytest.raises(ValueError, match="the study 'broken' of elsewhere cannot be loaded from no_such_module"):
        load("broken")


PRONOUNS = {"it", "they", "this", "that", "these", "those", "so", "nor", "too"}


@cache
def spoken() -> list[str]:
    """The titles of the claims as they are written, … for inserted values: the first argument of `judge`."""
    found = []
    for path in (SOURCE / "papers").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("judge", "said") and node.args:
                first = node.args[0]
                parts = first.values if isinstance(first, ast.JoinedStr) else [first]
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts))
    return [title for title in found if title != "…"]  # one that is a variable is not read here


def test_a_claim_is_a_statement_that_can_be_read_alone():
    """No title begins with a pronoun or leans on the claim before by one of these words as its subject."""
    found = spoken()
    assert len(found) > 60
    for title in found:
        words = title.replace(",", " ").replace(":", " ").split()
        assert len(words) >= 3, title
        assert not {words[0].lower(), words[-1].lower()} & PRONOUNS, title
        assert not {"it", "they"} & set(words), title


def test_the_table_of_claims_follows_from_their_records():
    script = Path(__file__).parents[3] / "scripts" / "make_claims_table.py"
    found = runpy.run_path(str(script))
    said = {"ours": "1 | 2", "tolerance": ""}
    claims = [judge("it holds", "ours", holds=True, kind="check", **said), judge("it falls", "§1", holds=False, **said)]
    text = found["table"]({"sample": claims}).splitlines()
    assert text[0] == (
        "1 findings: 0 reproduced, 0 not testable here, 1 not reproduced; "
        "1 checks: 1 reproduced, 0 not testable here, 0 not reproduced"
    )
    assert text[4:] == [
        r"| **not reproduced** | It falls | 1 \| 2 | [sample](sample.md) |",
        r"| reproduced | It holds (*ours, check*) | 1 \| 2 | [sample](sample.md) |",
    ]
