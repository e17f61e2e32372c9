"""Checkpoints on disk: whole or not there, checked when read, no pickle."""

import errno
import json
import math
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from depthscope import files as whole_files
from depthscope.files import content_sum
from depthscope_lab.training import checkpoint
from depthscope_lab.training.checkpoint import (
    CheckpointNotWritten,
    NotFinite,
    checkpoints_in,
    model_tensors,
    optimizer_tensors,
    read_checkpoint,
    read_newest,
    require_finite,
    restore_model,
    restore_optimizer,
    write_checkpoint,
)
from tiny_training import assert_bitwise_equal, run_in, tiny_config


def files(value: float = 1.0, size: int = 100) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.full((size,), value)}, "optimizer": {"0.step": torch.tensor(value)}}


def test_what_is_written_is_read(tmp_path: Path):
    path = write_checkpoint(tmp_path / "new", 7, files(), {"note": "ü", "nested": [1, None]})
    found = read_checkpoint(path)
    assert (found.step, found.record["note"], found.record["nested"]) == (7, "ü", [1, None])
    assert_bitwise_equal(found.files, files())
    assert sorted(child.name for child in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]


def test_the_last_few_are_kept_and_none_of_a_future_that_was_left(tmp_path: Path):
    for step in (5, 10, 20, 100_000_000):
        write_checkpoint(tmp_path, step, files(step), {}, keep=2)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000020", "step-100000000"]
    write_checkpoint(tmp_path, 30, files(), {}, keep=2)  # the newest was damaged: the run went on from 20
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-00000020", "step-00000030"]


def test_what_a_killed_run_did_not_come_to_remove_goes_at_the_next_start(tmp_path: Path, monkeypatch):
    config = tiny_config(steps=6)
    with monkeypatch.context() as patched:  # as if each process had been killed behind its last checkpoint
        patched.setattr(checkpoint, "remove_others", lambda *_: None)
        run_in(tmp_path, config, checkpoint_every=1)
    places = checkpoints_in(tmp_path / "checkpoints")
    assert len(places) == 6
    run_in(tmp_path, config, resume=True)  # it has nothing to do, and saves nothing
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == ["step-00000005", "step-00000006"]


def test_the_same_step_is_replaced(tmp_path: Path):
    write_checkpoint(tmp_path, 5, files(1.0), {})
    write_checkpoint(tmp_path, 5, files(2.0), {})
    assert_bitwise_equal(read_checkpoint(tmp_path / "step-00000005").files, files(2.0))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_a_disk_that_fills_up_midway_leaves_the_checkpoint_before_whole(tmp_path: Path):
    write_checkpoint(tmp_path, 1, files(), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # the kernel refuses what lies beyond
    try:
        with pytest.raises(CheckpointNotWritten, match=r"checkpoint of step 2: \S+step-00000002/model.safetensors: "):
            write_checkpoint(tmp_path, 2, files(size=100_000), {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert_bitwise_equal(read_checkpoint(tmp_path / "step-00000001").files, files())


@pytest.mark.parametrize(("module", "fails"), [(checkpoint, "save_file"), (whole_files, "force_to_disk")])
@pytest.mark.parametrize("call", [1, 2])
def test_whichever_write_fails_nothing_has_changed(tmp_path: Path, monkeypatch, module, fails: str, call: int):
    write_checkpoint(tmp_path, 1, files(), {})
    original, calls = getattr(module, fails), []

    def full(*arguments):
        calls.append(1)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*arguments)

    monkeypatch.setattr(module, fails, full)
    with pytest.raises(CheckpointNotWritten, match="No space left on device"):
        write_checkpoint(tmp_path, 2, files(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten, match=r"checkpoint of step 1: .*File exists"):
        write_checkpoint(tmp_path / "file", 1, files(), {})


def test_what_a_killed_run_left_unfinished_is_no_checkpoint_and_goes(tmp_path: Path):
    left = tmp_path / ".depthscope-abcdefgh"
    (left / "new" / "last" / "step-00000003").mkdir(parents=True)
    (left / "lock").touch()
    assert checkpoints_in(tmp_path) == []
    write_checkpoint(tmp_path, 4, files(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, flip_a_bit, remove])
@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_of_a_damaged_newest_one_is_told_and_the_one_before_is_used(tmp_path: Path, damage, file: str):
    write_checkpoint(tmp_path, 1, files(1.0), {})
    newest = write_checkpoint(tmp_path, 2, files(2.0), {})
    damage(newest / file)
    said: list[str] = []
    found = read_newest(tmp_path, said.append)
    assert found is not None
    assert found.step == 1
    assert len(said) == 1
    assert "step-00000002" in said[0]
    assert file in said[0]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": 2}', '{"format": 99, "step": 2, "files": {}}'])
def test_a_damaged_record_is_a_damaged_checkpoint(tmp_path: Path, content: str):
    newest = write_checkpoint(tmp_path, 2, files(), {})
    (newest / "state.json").write_text(content)
    with pytest.raises(ValueError, match="none of the 1 there can be used"):
        read_newest(tmp_path, lambda _message: None)


def test_a_record_that_names_files_of_other_folders_is_damaged(tmp_path: Path):
    newest = write_checkpoint(tmp_path / "mine", 2, files(), {})
    other = write_checkpoint(tmp_path / "other", 2, files(), {}) / "model.safetensors"
    state = json.loads((newest / "state.json").read_text())
    for name in (str(other), "../../other/step-00000002/model.safetensors"):
        forged = {**state, "files": {name: state["files"]["model.safetensors"]}}
        del forged["sha256"]
        (newest / "state.json").write_text(json.dumps({"sha256": content_sum(forged), **forged}))
        with pytest.raises(ValueError, match="it is no file of this folder"):
            read_checkpoint(newest)


def test_no_changed_digit_and_no_missing_key_of_the_record_goes_unnoticed(tmp_path: Path):
    write_checkpoint(tmp_path, 1, files(1.0), {})
    record = {"optimizer": {"lr": 0.1, "betas": (0.9, 0.99)}, "metrics": {"test_loss": math.nan}, 7: {10: 1, 9: 2}}
    state = write_checkpoint(tmp_path, 2, files(2.0), record) / "state.json"
    text = state.read_text()
    assert read_newest(tmp_path, print).step == 2

    def falls_back(damaged: str) -> bool:
        state.write_text(damaged)
        found = read_newest(tmp_path, lambda _message: None)
        return found is not None and found.step == 1

    digits = [place for place, letter in enumerate(text) if letter.isdigit()]
    assert len(digits) > 100
    assert all(falls_back(text[:at] + str(9 - int(text[at])) + text[at + 1 :]) for at in digits)
    for key in json.loads(text):
        assert falls_back(json.dumps({name: value for name, value in json.loads(text).items() if name != key}))
    assert falls_back("[" * 100_000)
    assert not falls_back(text)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(value: float):
    require_finite({"whole": torch.ones(3), "count": torch.tensor(4)})
    with pytest.raises(NotFinite, match=r"^broken$"):
        require_finite({"whole": torch.ones(3), "broken": torch.tensor([0.0, value])})


def test_none_is_none(tmp_path: Path):
    assert read_newest(tmp_path, print) is None
    assert read_newest(tmp_path / "nowhere", print) is None


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(4))


def test_tied_weights_are_saved_once_and_restored(tmp_path: Path):
    model, other = Tied(), Tied()
    tensors, tied = model_tensors(model)
    assert tied == {"second.weight": "first.weight"}
    found = read_checkpoint(write_checkpoint(tmp_path, 1, {"model": tensors}, {"tied": tied}))
    restore_model(other, found.files["model"], found.record["tied"])
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_goes_on_as_if_it_had_not_been_saved(tmp_path: Path, kind):
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()

    options = {"lr": 0.1, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer, resumed = kind(model.parameters(), **options), kind(other.parameters(), **options)
    step(model, optimizer)
    tensors, rest = optimizer_tensors(optimizer)
    path = write_checkpoint(tmp_path, 1, {"optimizer": tensors}, {"optimizer": rest})
    found = read_checkpoint(path)
    other.load_state_dict(model.state_dict())
    restore_optimizer(resumed, found.files["optimizer"], found.record["optimizer"])
    step(model, optimizer)
    step(other, resumed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_no_pickle_is_written(tmp_path: Path):
    path = write_checkpoint(tmp_path, 1, files(), {})
    json.loads((path / "state.json").read_text())
    for file in path.glob("*.safetensors"):
        size = int.from_bytes(file.read_bytes()[:8], "little")
        json.loads(file.read_bytes()[8 : 8 + size])
    assert os.listdir(tmp_path) == [path.name]
