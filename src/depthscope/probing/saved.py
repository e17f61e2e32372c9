"""A profile's files: written with their sums, and read only if they are what was written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd

from depthscope.files import write_folder
from depthscope.sealed import Record, read_record, with_record

COLUMNS = ["block", "station", "head", "measure", "sample", "value"]
SINK_COLUMNS = ["block", "sample", "token", "norm_ratio", "text"]
_FORMAT = 1
MADE_OF_A_PROFILE = ("profile.png", "skip_loss.csv", "diagnosis.json", "report.html")
_TABLES, _ABOUT = ("profile.parquet", "sinks.parquet"), "profile.json"


def write_saved(folder: Path, frame: pd.DataFrame, sinks: pd.DataFrame, metadata: Mapping[str, Any]) -> Path:
    """All files or none. What was made of a profile that is replaced (picture, verdict, page) goes with it."""
    return write_folder(folder, writers(frame, sinks, metadata), obsolete=MADE_OF_A_PROFILE)


def writers(
    frame: pd.DataFrame,
    sinks: pd.DataFrame,
    metadata: Mapping[str, Any],
    made: Mapping[str, Callable[[Path], object]] = MappingProxyType({}),
) -> dict[str, Callable[[Path], object]]:
    """By name, what writes each file to a path, for `write_folder`: in this order, since the last has the sums.

    `made` is what was made of the profile, and is written with it.
    """
    tables = dict(zip(_TABLES, (frame, sinks), strict=True))
    every = {name: partial(_write_table, table) for name, table in tables.items()} | dict(made)
    return with_record(every, _ABOUT, "profile", _FORMAT, metadata)


def _write_table(table: pd.DataFrame, path: Path) -> None:
    table.to_parquet(path, index=False)


def read_saved(folder: str | os.PathLike[str]) -> tuple[pd.DataFrame, dict[str, Any], pd.DataFrame]:
    """Table, metadata and sinks. Files of before there were sums are read without them.

    Every block has rows: a number of blocks beyond them is a mistake, and curves of it would fill the memory.
    """
    source = Path(folder)
    record = _read_about(source)
    frame, sinks = (_read_table(record, source / name) for name in _TABLES)
    if list(frame.columns) != COLUMNS or not {*SINK_COLUMNS} <= {*sinks.columns, "text"}:
        raise ValueError(f"{source} holds no profile of format {_FORMAT}")
    last = int(frame["block"].max()) if len(frame) else 0
    blocks, parts = record.content.get("blocks", last), record.content.get("parts") or {}
    if type(blocks) is not int or not last <= blocks <= len(frame):
        raise ValueError(f"{source}: expected {last} blocks, those that have rows, got {blocks!r}")
    counts = list(parts.values()) if isinstance(parts, dict) else [parts]
    if counts and not (all(type(count) is int and count > 0 for count in counts) and sum(counts) == blocks):
        raise ValueError(f"{source}: expected parts of {blocks} blocks together, got {parts!r}")
    return frame, record.content, sinks if "text" in sinks else sinks.assign(text="")


def read_made(folder: Path, name: str) -> Path | None:
    """What was made of a profile and written with it, if it is as it was; None if it was not made."""
    record = _read_about(folder)
    there = name in record.files or os.path.lexists(folder / name)
    return record.require(folder / name) if there else None


def _read_table(record: Record, path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(record.require(path))
    except FileNotFoundError:
        raise ValueError(f"no profile in {path.parent}: {path.name} is missing") from None
    except (ValueError, OSError) as error:  # pyarrow's errors are of these kinds
        said = " ".join(str(error).split())[:200]
        raise ValueError(said if str(path) in said else f"{path} is damaged: {said}") from None


def _read_about(source: Path) -> Record:
    try:
        record = read_record(source / _ABOUT, "profile", (_FORMAT,))
    except FileNotFoundError:
        raise ValueError(f"no profile in {source}: {_ABOUT} is missing") from None
    if record.files and not record.summed:
        raise ValueError(f"{source / _ABOUT} is damaged: it has no sum")
    return record
