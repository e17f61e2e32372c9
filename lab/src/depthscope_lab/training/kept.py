"""One cache of finished runs: a run is a file, named by its key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from depthscope.files import content_sum, write_whole
from depthscope.sealed import read_kept, record_writer

_KIND = "part of a study"


def kept(folder: Path, key: Mapping[str, Any], make: Callable[[], Any]) -> Any:
    """What an earlier process has computed for exactly this key; else what `make` computes, which is kept.

    It is data as JSON has them: a tuple comes back as a list, a number that is not finite as None, also at the first
    time. A file that is damaged is made again, with a warning. Code, libraries and data are no part of the key: the
    folder that a study gets is theirs.
    """
    if (before := found(folder, key)) is not None:
        return before[0]
    return keep(folder, key, make())


def found(folder: Path, key: Mapping[str, Any]) -> tuple[Any] | None:
    """What is kept for this key, in a tuple, since it may be None; None if nothing is."""
    known = {"key": plain(key)}
    before = read_kept(_path(folder, known), _KIND, known)
    return None if before is None else (before["found"],)


def keep(folder: Path, key: Mapping[str, Any], value: Any) -> Any:
    """Keeps the value for this key, and gives it as it will come back."""
    known = {"key": plain(key)}
    record = {**known, "found": plain(value)}
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_path(folder, known), record_writer(_KIND, 1, record))
    return record["found"]


def plain(value: Any) -> Any:
    """As JSON gives it back; None for nan and infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return json.loads(json.dumps(value))


def _path(folder: Path, known: Mapping[str, Any]) -> Path:
    return folder / f"{content_sum(known)[:12]}.json"
