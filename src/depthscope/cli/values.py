"""What is typed after an option, read and checked: numbers, files and folders, names separated by commas."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

_GREATEST = 2**63 - 1  # what torch counts with, and takes as a seed


def whole_number(least: int) -> Callable[[str | int], int]:
    """What reads a number of at least so much, as large as torch can count."""

    def read(text: str | int) -> int:
        try:
            number = int(text)
        except ValueError:
            number = -1
        if not least <= number <= _GREATEST:
            raise ValueError(f"expected a whole number from {least} to {_GREATEST}, got {text!r}")
        return number

    return read


def number(least: float, most: float, besides: str = "") -> Callable[[str | float], Any]:
    """What reads a number in [least, most], or one word `besides`."""

    def read(text: str | float) -> float | str:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if text != besides and not least <= value <= most:
            wanted = f"a number in [{least:g}, {most:g}]" + (f", or {besides}" if besides else "")
            raise ValueError(f"expected {wanted}, got {text!r}")
        return besides if text == besides else value

    return read


def counted(help: str, panel: str | None = None, *, least: int = 1, metavar: str = "N") -> Any:
    """The option of a number of things."""
    return typer.Option(metavar=metavar, parser=whole_number(least), help=help, rich_help_panel=panel)


def expanded(text: str) -> Path:
    """The path that a user means. A shell expands ~ only at the beginning of a word: `--out=~/x` comes as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a file or a folder, got {text!r}: there is no such home") from None


def folder(text: str) -> Path:
    """The same for `--out` and its like, where an empty text would mean the current folder."""
    if not text:
        raise ValueError("expected a file or a folder, got '': . is the current one")
    return expanded(text)


def data(text: str) -> str:
    """The same for `--data`, which may also be the name of a dataset."""
    return str(expanded(text)) if text.startswith("~") else text


def names(option: str, text: str) -> list[str]:
    """Names separated by commas, one at least."""
    if not (found := [name.strip() for name in text.split(",") if name.strip()]):
        raise ValueError(f"expected {option} with names separated by commas, got {text!r}")
    return found
