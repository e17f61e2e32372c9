"""Checkpoints on disk: safetensors and JSON, no pickle; there whole or not at all; the last few are kept.

    checkpoints/step-00000500/
        model.safetensors  optimizer.safetensors  [carry.safetensors]  state.json

A checkpoint is written under another name, forced to disk and renamed; `state.json` has the length and the
SHA-256 of every other file, so a damaged one is noticed and the one before is used.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from depthscope.files import write_whole_folder

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})")
_STATE = "state.json"

Files = Mapping[str, Mapping[str, Tensor]]  # "model" → name → tensor


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; those before it are untouched."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the tensors of every file, and the record that was saved with them."""

    path: Path
    step: int
    files: dict[str, dict[str, Tensor]]
    record: dict[str, Any]


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; what was not finished has another name."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=_step_of)


def write_checkpoint(folder: Path, step: int, files: Files, record: Mapping[str, Any], keep: int = 2) -> Path:
    """Writes `folder/step-…`, then removes all but the newest `keep`. On failure nothing has changed."""
    target = folder / f"step-{step:08d}"

    def write(scratch: Path) -> None:
        sums = {}
        for name, tensors in files.items():
            path = scratch / f"{name}.safetensors"
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path)
            sums[path.name] = _sum(path)
        state = {"format": FORMAT, "step": step, "files": sums, **record}
        (scratch / _STATE).write_text(json.dumps(state, ensure_ascii=False) + "\n", encoding="utf-8")

    try:
        # One that is there was left by a run that went on from before it, e.g. because it is damaged.
        write_whole_folder(target, write, existing="replace", forced=True)
    except (OSError, SafetensorError) as error:
        whole = checkpoints_in(folder)
        there = f"{whole[-1]} is whole: --resume goes on from there" if whole else "there is none before it"
        raise CheckpointNotWritten(f"could not write the checkpoint of step {step}: {error}; {there}") from error
    _remove_old(folder, keep, spare=target)
    return target


def read_newest(folder: Path, say: Callable[[str], object]) -> Checkpoint | None:
    """The newest whole checkpoint, or None if there never was one; `say` is told of each damaged one."""
    found = checkpoints_in(folder)
    for path in reversed(found):
        try:
            return read_checkpoint(path)
        except ValueError as error:
            say(f"{error}; trying the one before")
    if found:
        raise ValueError(f"expected a whole checkpoint in {str(folder)!r}, all {len(found)} are damaged")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, every byte checked; a damaged one is a ValueError that names the file."""
    try:
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise ValueError(f"format {state['format']}, this version reads {FORMAT}")
        step, sums = int(state["step"]), dict(state["files"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"the checkpoint {str(path)!r} is damaged: {_STATE}: {error}") from None
    files = {}
    for name, expected in sums.items():
        try:
            if (found := _sum(path / name)) != expected:
                raise ValueError(f"expected {expected['bytes']} bytes of known content, got {found['bytes']} others")
            files[name.removesuffix(".safetensors")] = load_file(path / name)
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"the checkpoint {str(path)!r} is damaged: {name}: {error}") from None
    return Checkpoint(path, step, files, state)


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _sum(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": file_digest(file, "sha256").hexdigest()}


def _remove_old(folder: Path, keep: int, spare: Path) -> None:
    """All but the newest `keep`, never `spare`; and what killed runs have left unfinished."""
    for path in checkpoints_in(folder)[:-keep]:
        if path != spare:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".s*-*"):
        shutil.rmtree(path, ignore_errors=True)
