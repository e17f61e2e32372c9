"""Checkpoints on disk: safetensors and JSON, no pickle; there whole or not at all; the last few are kept.

    checkpoints/step-00000500/
        model.safetensors  optimizer.safetensors  [carry.safetensors]  state.json

A checkpoint is written under another name, forced to disk and renamed; `state.json` has the length and the
SHA-256 of every other file, and the SHA-256 of what it says itself, so a damaged one is noticed and the one before is
used.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from depthscope.files import content_sum, in_words, sum_of, write_whole_folder
from depthscope.report.formats import CHECKPOINT_FORMAT, checkpoints_in, read_state, step_of

_STATE = "state.json"

Files = Mapping[str, Mapping[str, Tensor]]  # "model" → name → tensor


class CheckpointNotWritten(OSError):
    """A checkpoint could not be written; those before it are untouched."""


class NotFinite(ValueError):
    """A tensor that a checkpoint must not have; the argument names it."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read: the tensors of every file, and the record that was saved with them."""

    path: Path
    step: int
    files: dict[str, dict[str, Tensor]]
    record: dict[str, Any]


def newest_until(folder: Path, step: int | None) -> Path | None:
    """The newest checkpoint of this step or an earlier one; None if there is none, or no step."""
    found = [] if step is None else [path for path in checkpoints_in(folder) if step_of(path) <= step]
    return found[-1] if found else None


def write_checkpoint(
    folder: Path, step: int, files: Files, record: Mapping[str, Any], keep: int = 2, also: Collection[Path] = ()
) -> Path:
    """Writes `folder/step-…`, then removes all but the newest `keep` and those that are named in `also`. On failure
    nothing has changed."""
    target = folder / f"step-{step:08d}"
    place = target  # what is being written

    def write(scratch: Path) -> None:
        nonlocal place
        sums = {}
        for name, tensors in files.items():
            path = scratch / f"{name}.safetensors"
            place = target / path.name
            save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path)
            sums[path.name] = sum_of(path)
        place = target / _STATE
        state = json.loads(json.dumps({"format": CHECKPOINT_FORMAT, "step": step, "files": sums, **record}))
        text = json.dumps({"sha256": content_sum(state), **state}, ensure_ascii=False) + "\n"
        (scratch / _STATE).write_text(text, encoding="utf-8")
        place = target

    try:
        # One that is there was left by a run that went on from before it, e.g. because it is damaged.
        write_whole_folder(target, write, forced=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointNotWritten(
            f"could not write the checkpoint of step {step}: {place}: {in_words(error)}"
        ) from error
    remove_others(folder, step, keep, also)
    return target


def require_finite(tensors: Mapping[str, Tensor]) -> None:
    """Refuses a nan or an infinity: nobody could go on from there."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise NotFinite(name)


def refuse_obstacles(folder: Path) -> None:
    """What stands where a checkpoint will be written would cost the work until then."""
    for path in [folder, *checkpoints_in(folder)]:
        if os.path.lexists(path) and not path.is_dir():
            raise ValueError(f"expected a folder in {str(path)!r}, got a file: remove it, or choose another --out")


def read_newest(
    folder: Path, say: Callable[[str], object], check: Callable[[Checkpoint], object] = lambda _: None
) -> Checkpoint | None:
    """The newest whole checkpoint, or None if there never was one; of each damaged one `say` gets a line.

    `check` refuses, by a ValueError, one that nobody can go on from.
    """
    found = checkpoints_in(folder)
    for path in reversed(found):
        try:
            newest = read_checkpoint(path)
            check(newest)
            return newest
        except ValueError as error:
            say(f"{error}; trying the one before")
    if found:
        raise ValueError(f"expected a whole checkpoint in {str(folder)!r}, none of the {len(found)} there can be used")
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """One checkpoint, every byte checked; a damaged one is a ValueError that names the file."""
    reading = _STATE
    try:
        state = read_state(path / _STATE)
        if state["step"] != step_of(path):
            raise ValueError(f"it is of step {state['step']!r}, and its folder was renamed or copied")
        files = {}
        for reading, expected in state["files"].items():
            if Path(reading).name != reading:
                raise ValueError("it is no file of this folder")
            if (found := sum_of(path / reading)) != expected:
                raise ValueError(f"its {found['bytes']} bytes are not what was written")
            files[reading.removesuffix(".safetensors")] = load_file(path / reading)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the checkpoint {str(path)!r} is damaged: {reading}: {in_words(error)}") from None
    return Checkpoint(path, state["step"], files, state)


def remove_others(folder: Path, step: int, keep: int, also: Collection[Path]) -> None:
    """All but the newest `keep` up to this step, and `also`: later ones are of a run that could not be continued from
    there."""
    found = checkpoints_in(folder)
    until = [path for path in found if step_of(path) <= step]
    for path in [*(path for path in until[:-keep] if path not in also), *found[len(until) :]]:
        shutil.rmtree(path, ignore_errors=True)


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights and buffers by name; of tied ones the first, and name → first name for the others."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            tensors[name] = tensor
    return tensors, tied


def restore_model(model: nn.Module, tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> None:
    """The inverse of `model_tensors`, on the model's own device."""
    model.load_state_dict(dict(tensors) | {name: tensors[first] for name, first in tied.items()})


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """`number.key` → tensor for what every parameter has, and what is no tensor, as JSON: the same keys, groups."""
    state = optimizer.state_dict()
    everything = {f"{number}.{key}": value for number, own in state["state"].items() for key, value in own.items()}
    tensors = {name: value for name, value in everything.items() if isinstance(value, Tensor)}
    values = {name: value for name, value in everything.items() if name not in tensors}
    return tensors, {"values": values, "groups": state["param_groups"]}


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> None:
    """The inverse of `optimizer_tensors`."""
    state: dict[int, dict[str, Any]] = {}
    for place, value in {**rest["values"], **tensors}.items():
        number, key = place.split(".", 1)
        state.setdefault(int(number), {})[key] = value
    groups = [dict(group) | {"betas": tuple(group["betas"])} if "betas" in group else group for group in rest["groups"]]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
