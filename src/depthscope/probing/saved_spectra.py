"""The files of spectra: a table and what it is of, with the sum of the table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.files import read_json, sum_of, write_folder

_TABLE, _ABOUT = "spectra.parquet", "spectra.json"
_FORMAT = 1


def write_spectra(folder: Path, frame: pd.DataFrame, metadata: dict[str, Any]) -> Path:
    """Both files or none."""
    sums: dict[str, Any] = {}

    def write_table(path: Path) -> None:
        frame.to_parquet(path, index=False)
        sums.update(sum_of(path))

    def write_about(path: Path) -> None:
        about = {"format": _FORMAT, **metadata, "files": {_TABLE: sums}}
        path.write_text(json.dumps(about, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")

    return write_folder(folder, {_TABLE: write_table, _ABOUT: write_about}, obsolete=("spectra.png",))


def read_spectra(folder: Path, columns: Sequence[str]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table, which must have these columns, and the metadata."""
    try:
        metadata = read_json(folder / _ABOUT)
        if not isinstance(metadata, dict) or metadata.pop("format", None) != _FORMAT:
            raise ValueError("another format")
        if sum_of(folder / _TABLE) != metadata.pop("files")[_TABLE]:
            raise ValueError(f"{_TABLE} is not what was written")
        frame = pd.read_parquet(folder / _TABLE)
    except FileNotFoundError as error:
        raise ValueError(f"no spectra in {folder}: {Path(error.filename).name} is missing") from None
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(f"{folder} holds no spectra: {' '.join(str(error).split())[:200]}") from None
    if list(frame.columns) != list(columns):
        raise ValueError(f"{folder} holds no spectra of format {_FORMAT}")
    return frame, metadata
