"""Files and folders on the command line: `--out=~/x` means a home, as it would without the equals sign."""

from __future__ import annotations

from pathlib import Path


def folder(text: str) -> Path:
    """The path that a user means; a shell expands ~ only at the beginning of a word."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a file or a folder, got {text!r}: there is no such home") from None


def data(text: str) -> str:
    """The same for `--data`, which may also be the name of a dataset."""
    return str(folder(text)) if text.startswith("~") else text
