"""The examples run, print what they promise and say how long they take; the notebook runs offline."""

import ast
import json
import re
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sharded_model
import torch
from torch import multiprocessing

from pages import ROOT
from warm import warm_server

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOK = ROOT / "examples" / "tour.ipynb"


def printed_by(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What an example prints, run in this process: what it imports is imported already."""
    monkeypatch.setattr(sys, "argv", [name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trainers' own imports
        code = compile((ROOT / "examples" / f"{name}.py").read_text(), f"{name}.py", "exec")
        exec(code, {"__name__": "__main__"})
    return capsys.readouterr().out


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"\b\d\.\d+", text)]


def test_huggingface_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert printed_by("huggingface_model", capsys, monkeypatch).startswith("Collapsed.")


def test_your_own_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    printed = printed_by("your_own_model", capsys, monkeypatch)
    assert "unknown family" in printed
    *_, last = printed.splitlines()
    assert last.startswith("block 24: token similarity 0.826 before, 0.008 with")  # as docs/examples.md says


def test_training_loop(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    learns, collapses = printed_by("training_loop", capsys, monkeypatch).split("learning rate")[1:]
    rate, loss, *similarity = numbers(learns)
    assert (rate, len(similarity)) == (0.003, 8)
    assert loss < 0.7
    assert max(similarity) < 0.95
    loss = float(re.findall(r"^  loss (\S+)", collapses, flags=re.MULTILINE)[0])
    assert loss == pytest.approx(1.39, abs=0.05)  # ln 4
    assert numbers(collapses)[-1] > 0.99
    assert "stopped" not in learns
    assert (
        "stopped: token_similarity>0.99 in half of the blocks for 3 after 20 holds since step 5; step 20: " in collapses
    )


def test_huggingface_trainer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    printed = printed_by("huggingface_trainer", capsys, monkeypatch)
    assert re.findall(r"^step (\d)", printed, flags=re.MULTILINE) == ["0", "2", "4"]
    assert "measured: 6 blocks at steps [0, 2, 4]" in printed


def test_lightning_trainer(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    printed = printed_by("lightning_trainer", capsys, monkeypatch)
    assert re.findall(r"^step (\d)", printed, flags=re.MULTILINE) == ["0", "2", "4"]
    assert "'depth/t_sim_last'" in printed


def test_two_checkpoints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    *_, last = printed_by("two_checkpoints", capsys, monkeypatch).splitlines()
    block, after, before, difference = map(float, last.split())
    assert block == 6
    assert after > before + 0.3
    assert difference == pytest.approx(after - before, abs=0.002)


def test_sharded_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Its two processes are forks of one that has torch already; with "spawn" each would import it anew."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no torch.distributed with gloo")
    warm_server()
    monkeypatch.setattr(multiprocessing, "spawn", partial(multiprocessing.start_processes, start_method="forkserver"))
    sharded_model.main()
    printed = capsys.readouterr().out
    assert len(re.findall(r"process \d:   (?:bitwise the same|the same to \de-0[6-9])", printed)) == 2, printed
    source = Path(sharded_model.__file__).read_text()
    assert source.endswith('\n\nif __name__ == "__main__":\n    main()\n')  # what "spawn" needs


def test_every_example_is_run_listed_and_says_how_long_it_takes():
    here = Path(__file__).read_text() + (ROOT / "tests" / "probing" / "test_planted.py").read_text()
    listed = (ROOT / "docs" / "examples.md").read_text()
    for path in EXAMPLES:
        said = ast.get_docstring(ast.parse(path.read_text()))
        ways = (f'"{path.stem}"', path.name, f"\nimport {path.stem}\n", f"from {path.stem} import")
        assert any(way in here for way in ways), path.name
        assert f"(../examples/{path.name})" in listed, path.name
        assert said is not None
        assert f"python examples/{path.name}" in said
        assert re.search(r"\b(second|minute)s?\b", said), path.name


# --- the notebook ---------------------------------------------------------------------------------


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    space: dict[str, Any] = {"__name__": "__notebook__"}
    code = ["".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) >= 5
    for number, source in enumerate(code):
        exec(compile(source, f"tour.ipynb, cell {number}", "exec"), space)
    last = {name: profile.curve("token_similarity")[-1] for name, profile in space["profiles"].items()}
    assert last["post-norm"] > 0.99
    assert last["de-escalated"] < 0.3
    assert last["de-escalated"] < last["pre-norm"] < last["post-norm"]


def test_the_notebook_holds_no_outputs():
    assert all(
        not cell["outputs"] and cell["execution_count"] is None for cell in cells() if cell["cell_type"] == "code"
    )
