"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal


def write_whole(target: Path, write: Callable[[Path], object]) -> Path:
    """Calls `write` with a path beside the target, and puts the file in the target's place once it is complete."""
    scratch = target.with_name(f".{target.stem}-{os.getpid()}{target.suffix}")
    try:
        write(scratch)
        os.replace(scratch, target)
    finally:
        scratch.unlink(missing_ok=True)
    return target


def write_json(target: Path, value: Any, *, indent: int | None = 2) -> Path:
    """Strict JSON: nan and infinity are refused."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    return write_whole(target, lambda path: path.write_text(text, encoding="utf-8"))


def write_folder(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> Path:
    """Several files of one folder: all are made first, then each takes its place, in the order given."""
    folder.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder, prefix=".writing-"))
    try:
        for name, write in writers.items():
            write(scratch / name)
        for name in writers:
            os.replace(scratch / name, folder / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def write_whole_folder(
    target: Path,
    write: Callable[[Path], object],
    *,
    existing: Literal["replace", "keep"] = "replace",
    forced: bool = False,
) -> Path:
    """Calls `write` with a new folder beside the target, and renames the folder to the target once it is complete.

    If anything fails, the target is as it was. `existing`: what becomes of a folder that is at the target by then;
    "keep" is for content that is always the same, where another process may have been faster. `forced`: all that
    was written reaches the disk before the rename does, and the rename before this function ends. A process that is
    killed leaves a folder `.NAME-…` beside the target.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}-{token_hex(4)}")
    scratch.mkdir()
    try:
        write(scratch)
        if forced:
            for path in [*scratch.rglob("*"), scratch]:
                force_to_disk(path)
        stale = _rename(scratch, target, existing)
        if forced:
            force_to_disk(target.parent)
        shutil.rmtree(stale, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _rename(scratch: Path, target: Path, existing: Literal["replace", "keep"]) -> Path:
    """Gives the place of what was at the target before; nothing need be there."""
    stale = scratch.with_name(f"{scratch.name}-stale")
    if existing == "replace" and target.exists():
        target.rename(stale)
    try:
        scratch.rename(target)
    except OSError:
        if stale.exists():
            stale.rename(target)
        if existing == "replace" or not target.is_dir():
            raise
    return stale


def force_to_disk(path: Path) -> None:
    """Of a file its content, of a folder its names: a rename must not reach the disk before what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(folder: Path) -> None:
    """Makes the folder and tries it: minutes of computing are not spent on results that cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"expected a folder that can be written for --out, got {str(folder)!r}: {error}") from None
