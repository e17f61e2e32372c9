"""A profile's files: written with their sums, and read only if they are what was written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.files import content_sum, read_json, require_format, sum_of, write_folder

COLUMNS = ["block", "station", "head", "measure", "sample", "value"]
SINK_COLUMNS = ["block", "sample", "token", "norm_ratio", "text"]
_FORMAT = 1
MADE_OF_A_PROFILE = ("profile.png", "skip_loss.csv", "diagnosis.json", "report.html")
_TABLES = ("profile.parquet", "sinks.parquet")


def write_saved(folder: Path, frame: pd.DataFrame, sinks: pd.DataFrame, metadata: Mapping[str, Any]) -> Path:
    """All files or none. What was made of a profile that is replaced (picture, verdict, page) goes with it."""
    return write_folder(folder, writers(frame, sinks, metadata), obsolete=MADE_OF_A_PROFILE)


def writers(frame: pd.DataFrame, sinks: pd.DataFrame, metadata: Mapping[str, Any]) -> dict[str, Callable[[Path], None]]:
    """By name, what writes each file to a path, for `write_folder`: in this order, since the last has the sums."""
    about = json.loads(json.dumps({"format": _FORMAT, **metadata}, ensure_ascii=False, allow_nan=False))
    sums: dict[str, Any] = {}

    def write_table(name: str, table: pd.DataFrame, path: Path) -> None:
        table.to_parquet(path, index=False)
        sums[name] = sum_of(path)

    def write_about(path: Path) -> None:
        known = {**about, "files": sums}
        text = json.dumps({**known, "sha256": content_sum(known)}, indent=2, ensure_ascii=False)
        path.write_text(text + "\n", encoding="utf-8")

    tables = dict(zip(_TABLES, (frame, sinks), strict=True))
    return {name: partial(write_table, name, table) for name, table in tables.items()} | {"profile.json": write_about}


def read_saved(folder: str | os.PathLike[str]) -> tuple[pd.DataFrame, dict[str, Any], pd.DataFrame]:
    """Table, metadata and sinks. Files of before there were sums are read without them."""
    source = Path(folder)
    metadata = _read_about(source)
    sums = metadata.pop("files", {})
    frame, sinks = (_read_table(source / name, sums.get(name)) for name in _TABLES)
    if list(frame.columns) != COLUMNS:
        raise ValueError(f"{source} holds no profile of format {_FORMAT}")
    _check_blocks(source, frame, metadata)
    return frame, metadata, sinks if "text" in sinks else sinks.assign(text="")


def _read_table(path: Path, written: Any) -> pd.DataFrame:
    try:
        if written is not None and sum_of(path) != written:
            raise ValueError("it is not what was written")
        return pd.read_parquet(path)
    except FileNotFoundError:
        raise ValueError(f"no profile in {path.parent}: {path.name} is missing") from None
    except (ValueError, OSError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())[:200]}") from None


def _read_about(source: Path) -> dict[str, Any]:
    try:
        metadata = read_json(source / "profile.json")
    except FileNotFoundError:
        raise ValueError(f"no profile in {source}: profile.json is missing") from None
    except ValueError as error:
        raise ValueError(f"{source / 'profile.json'} is not a profile: {error}") from None
    if not isinstance(metadata, dict):
        raise ValueError(f"{source} holds no profile of format {_FORMAT}")
    try:
        require_format(metadata.get("format"), (_FORMAT,))
    except ValueError as error:
        raise ValueError(f"{source} holds no profile that can be read here: {error}") from None
    written = metadata.pop("sha256", None)
    if ("files" in metadata or written is not None) and written != content_sum(metadata):
        raise ValueError(f"{source / 'profile.json'} is damaged: it is not what was written")
    del metadata["format"]
    return metadata


def _check_blocks(source: Path, frame: pd.DataFrame, metadata: Mapping[str, Any]) -> None:
    """Every block has rows: a number of blocks beyond them is a mistake, and curves of it would fill the memory."""
    last = int(frame["block"].max()) if len(frame) else 0
    blocks, parts = metadata.get("blocks", last), metadata.get("parts") or {}
    if type(blocks) is not int or not last <= blocks <= len(frame):
        raise ValueError(f"{source}: expected {last} blocks, those that have rows, got {blocks!r}")
    if not isinstance(parts, dict) or (parts and _count(parts) != blocks):
        raise ValueError(f"{source}: expected parts of {blocks} blocks together, got {parts!r}")


def _count(parts: Mapping[str, Any]) -> int | None:
    return sum(parts.values()) if all(type(count) is int and count > 0 for count in parts.values()) else None
