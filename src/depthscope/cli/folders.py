"""Files and folders on the command line: `--out=~/x` means a home, as it would without the equals sign."""

from __future__ import annotations

from pathlib import Path


def expanded(text: str) -> Path:
    """The path that a user means; a shell expands ~ only at the beginning of a word."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a file or a folder, got {text!r}: there is no such home") from None


def folder(text: str) -> Path:
    """The same for `--out` and its like, where nothing would mean the current folder."""
    if not text:
        raise ValueError("expected a file or a folder, got '': . is the current one")
    return expanded(text)


def data(text: str) -> str:
    """The same for `--data`, which may also be the name of a dataset."""
    return str(expanded(text)) if text.startswith("~") else text
