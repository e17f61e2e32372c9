"""The files of spectra: a table and what it is of, with the sum of the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.sealed import read_tables, write_tables

_TABLE, _ABOUT = "spectra.parquet", "spectra.json"
_FORMAT = 1


def write_spectra(folder: Path, frame: pd.DataFrame, metadata: dict[str, Any]) -> Path:
    """Both files or none."""
    return write_tables(folder, _ABOUT, "spectra", _FORMAT, metadata, {_TABLE: frame}, obsolete=("spectra.png",))


def read_spectra(folder: Path, columns: Sequence[str]) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table, which must have these columns, and the metadata."""
    (frame,), metadata = read_tables(folder, _ABOUT, "spectra", _FORMAT, {_TABLE: _TABLE}, "spectra")
    if list(frame.columns) != list(columns):
        raise ValueError(f"{folder} holds no spectra of format {_FORMAT}")
    return frame, metadata
