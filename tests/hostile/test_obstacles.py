"""Pipes, folders and names where files should be: noticed before anything is computed, and said in one line."""

import errno
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from depthscope.cli.app import main
from depthscope.files import content_sum, in_words, require_writable, sum_of, write_folder, write_json
from depthscope.locks import owned
from depthscope.report.formats import read_metrics
from depthscope_lab.training.checkpoint import checkpoints_in, read_newest
from depthscope_lab.training.display import Terminal

RUN = (
    "vit-digits",
    "--depth",
    "1",
    "--width",
    "8",
    "--set",
    "ffn_width=8",
    "--set",
    "heads=1",
    "--steps",
    "4",
    "--cpu",
)
OFTEN = ("--set", "checkpoint_every=2", "--set", "tracker=none")


@pytest.fixture(autouse=True)
def no_hanging() -> Iterator[None]:
    """What reads a pipe would wait for ever."""

    def ring(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(120)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The program in this process: exit code, and all that it printed."""

    def call(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["depthscope", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ended.value.code or 0), out + err

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["depthscope", "train", *RUN, *OFTEN, "--out", str(folder)])
        with pytest.raises(SystemExit):
            main()
    assert [path.name for path in checkpoints_in(folder / "checkpoints")] == ["step-00000002", "step-00000004"]
    return folder


@pytest.fixture
def resumed(trained: Path, tmp_path: Path, program):
    """A copy of the run, and what continues it."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder)
    return folder, lambda: program("train", *RUN, *OFTEN, "--out", str(folder), "--resume")


def forge(checkpoint: Path, without: str = "") -> None:
    """Gives a checkpoint's record the right sums, and takes a key out of it."""
    state = json.loads((checkpoint / "state.json").read_text())
    state = {key: value for key, value in state.items() if key not in ("sha256", without)}
    state["files"] = {name: sum_of(checkpoint / name) for name in state["files"]}
    (checkpoint / "state.json").write_text(json.dumps({"sha256": content_sum(state), **state}))


# --- a run's folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state.json", "model.safetensors", "optimizer.safetensors"])
def test_a_pipe_in_a_checkpoint_is_damage(resumed, name: str):
    folder, resume = resumed
    path = folder / "checkpoints" / "step-00000004" / name
    path.unlink()
    os.mkfifo(path)
    code, said = resume()
    assert code == 0, said
    assert f"is damaged: {name}: expected a file, got a folder, a pipe or a device; trying the one before" in said
    assert "continuing at step 2 of 4" in said


@pytest.mark.parametrize("name", ["metrics.jsonl", ".owner"])
def test_a_pipe_in_a_run_is_named(resumed, name: str):
    folder, resume = resumed
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    code, said = resume()
    assert code == 2
    assert f"cannot use '{folder / name}': expected a file, got" in said


def test_a_checkpoint_without_its_record_is_told_in_words(resumed):
    folder, resume = resumed
    (folder / "checkpoints" / "step-00000004" / "state.json").unlink()
    code, said = resume()
    assert code == 0, said
    assert "is damaged: state.json: No such file or directory; trying the one before" in said
    assert "Errno" not in said


def test_a_record_without_a_key_is_damage_whatever_its_sum(resumed):
    folder, resume = resumed
    forge(folder / "checkpoints" / "step-00000004", without="versions")
    code, said = resume()
    assert code == 0, said
    assert "is damaged: its record has no versions; trying the one before" in said


def test_a_record_without_its_files_is_damage(resumed):
    folder, resume = resumed
    path = folder / "checkpoints" / "step-00000004" / "state.json"
    state = json.loads(path.read_text())
    del state["files"], state["sha256"]
    path.write_text(json.dumps({"sha256": content_sum(state), **state}))
    code, said = resume()
    assert code == 0, said
    assert "it does not say its step and its files; trying the one before" in said


def test_a_checkpoint_under_another_number_is_damage(resumed):
    folder, resume = resumed
    shutil.rmtree(folder / "checkpoints" / "step-00000004")
    shutil.copytree(folder / "checkpoints" / "step-00000002", folder / "checkpoints" / "step-00000003")
    code, said = resume()
    assert code == 0, said
    assert "it is of step 2, and its folder was renamed or copied; trying the one before" in said
    assert "continuing at step 2 of 4" in said


@pytest.mark.parametrize("file", ["model", "optimizer"])
def test_a_checkpoint_that_is_not_finite_is_damage_whatever_its_sum(resumed, file: str):
    folder, resume = resumed
    checkpoint = folder / "checkpoints" / "step-00000004"
    tensors = load_file(checkpoint / f"{file}.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    save_file({**tensors, name: torch.full_like(tensors[name], torch.nan)}, checkpoint / f"{file}.safetensors")
    forge(checkpoint)
    code, said = resume()
    assert code == 0, said
    assert re.search(rf"is damaged: the (weight|optimizer's) {re.escape(name)} is not finite; trying", said)


@pytest.mark.parametrize("name", ["checkpoints/step-00000004", "checkpoints"])
def test_a_file_in_the_place_of_a_checkpoint_is_refused_before_training(resumed, name: str):
    folder, resume = resumed
    shutil.rmtree(folder / name)
    (folder / name).touch()
    lines = len(read_metrics(folder / "metrics.jsonl"))
    code, said = resume()
    assert code == 2
    assert f"expected a folder in '{folder / name}', got a file: remove it" in said
    assert len(read_metrics(folder / "metrics.jsonl")) == lines


def test_a_folder_in_the_place_of_a_file_is_named_and_nothing_is_left(resumed):
    folder, resume = resumed
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()
    for _ in range(2):
        code, said = resume()
        assert code == 2
        assert f"could not write {folder / 'config.json'}: there is a folder in its place" in said
    assert not list(folder.glob(".depthscope-*"))


def test_read_newest_without_a_check_takes_what_is_whole(trained: Path):
    found = read_newest(trained / "checkpoints", pytest.fail)
    assert found is not None
    assert found.step == 4


# --- writing ------------------------------------------------------------------------------------------


def test_what_cannot_take_its_place_leaves_no_scratch_and_names_the_place(tmp_path: Path, monkeypatch):
    write_json(tmp_path / "a.json", "old")

    def refuse(_source: Path, target: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied", str(_source), None, str(target))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match=f"could not write {tmp_path / 'a.json'}: Permission denied"):
        write_json(tmp_path / "a.json", "new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_an_obstacle_of_one_file_leaves_all_of_them_as_they_were(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a").write_text("old")
    for files, obsolete in ((("a", "b"), ()), (("b", "a"), ()), (("a",), ("b",))):
        with pytest.raises(OSError, match=f"could not write {tmp_path / 'b'}: there is a folder in its place"):
            write_folder(tmp_path, {name: lambda path: path.touch() for name in files}, obsolete=obsolete)
    assert (tmp_path / "a").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_pipe_is_no_owner(tmp_path: Path):
    os.mkfifo(tmp_path / ".owner")
    with pytest.raises(OSError, match=r"expected a file, got a pipe or a device: '.*/.owner'"), owned(tmp_path):
        pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left on device"),
        (
            OSError(27, "Error writing bytes to file. Detail: [errno 27] File too large"),
            "Error writing bytes to file. Detail: File too large",
        ),
        (ValueError("I/O error: File too large (os error 27)"), "I/O error: File too large"),
        (OSError("[Errno 2] No such file"), "No such file"),
    ],
)
def test_errors_of_the_system_are_told_in_words(error: Exception, said: str):
    assert in_words(error) == said


@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 300 + "/b", os.fsdecode(b"a/\xff")])
def test_a_name_that_no_folder_can_have_is_refused_before_computing(name: str, tmp_path: Path, program, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=re.escape(repr(name))):
        require_writable(Path(name))
    code, said = program("probe", "encoder", "--depth", "2", "--out", name)
    assert code == 2
    assert f"can be written for --out, got {name!r}: " in said
    assert "token similarity" not in said
    assert list(tmp_path.iterdir()) == []


def test_folders_with_dots_are_tried_without_being_made(tmp_path: Path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("a/b", "a/../b", "a/../../b", "../c/d", "."):
        require_writable(Path(name))
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


@pytest.mark.parametrize("command", [("probe", "encoder"), ("train", "vit-digits")])
def test_no_name_at_all_is_refused(command: tuple[str, ...], program):
    code, said = program(*command, "--out", "")
    assert code == 2
    assert "--out" in said
    assert "''" in said


def test_a_full_disk_at_the_picture_leaves_the_profile_before(tmp_path: Path, program, monkeypatch):
    probe = ("probe", "encoder", "--depth", "2", "--width", "8", "--heads", "1", "--out", str(tmp_path / "out"))
    assert program(*probe)[0] == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert "profile.png" in before

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    code, said = program(*probe, "--seed", "1")
    assert code == 2
    assert f"could not write {tmp_path / 'out' / 'profile.png'}: No space left on device" in said
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# --- the terminal -------------------------------------------------------------------------------------


def test_escapes_in_names_do_not_reach_the_terminal(tmp_path: Path, program, capsys: pytest.CaptureFixture[str]):
    Terminal().say("begun with \x1b[31mred")
    assert capsys.readouterr().err == "begun with \\x1b[31mred\n"
    code, said = program("train", *RUN, *OFTEN, "--out", str(tmp_path / "x\x1b[31mred"))
    assert code == 0, said
    assert "\x1b" not in said
    assert "x\\x1b[31mred" in said
