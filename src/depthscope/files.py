"""Files that are there whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


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


def require_writable(folder: Path) -> None:
    """Makes the folder and tries it: minutes of computing are not spent on results that cannot be kept."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"expected a folder that can be written for --out, got {str(folder)!r}: {error}") from None
