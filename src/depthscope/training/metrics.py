"""`metrics.jsonl`: one line of JSON per logged step or evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthscope.files import require_file, write_whole
from depthscope.sealed import append_sealed

METRICS = "metrics.jsonl"
KIND = "metrics 1"  # of the log, with the number of its format
WATCHED = "token_similarity"  # of the last block's tokens, in a step that was watched


def append_metrics(path: Path, step: int, values: Mapping[str, float]) -> None:
    """What is not finite is null: JSON knows neither nan nor infinity."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    append_sealed(path, KIND, json.dumps({"step": step, **finite}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a line that a killed run has left unfinished is not there."""
    return [row for row in map(_row, _lines(path)) if row is not None]


def evaluated(row: Mapping[str, Any]) -> list[str]:
    """What a task reported in this line, by name; nothing if the line is not of an evaluation.

    The loop's own lines have a learning rate (its log) or the similarity of tokens (a step that was watched).
    """
    return [] if "lr" in row or WATCHED in row else [name for name in row if name != "step"]


def keep_until(path: Path, step: int) -> int:
    """Drops what a run wrote after the checkpoint of a step, which will be computed again; 0: all of it.

    Of `metrics.jsonl` or of what `depthscope.watch` wrote. A step that was watched has the number of updates before
    it: that of the checkpoint's own number came after the checkpoint. Returns how many lines in between cannot be read.
    """
    lines = _lines(path)
    rows = [_row(line) for line in lines]
    kept = [line for line, row in zip(lines, rows, strict=True) if row is not None and _precedes(row, step)]
    if kept:
        text = "".join(line + "\n" for line in kept)
        write_whole(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))
    else:
        path.unlink(missing_ok=True)
    return sum(row is None for row in rows[:-1])


def _precedes(row: Mapping[str, Any], step: int) -> bool:
    watched = WATCHED in row or "curves" in row
    return bool(row["step"] < step or (row["step"] == step > 0 and not watched))


def _lines(path: Path) -> list[str]:
    return require_file(path).read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def _row(line: str) -> dict[str, Any] | None:
    """None for a line that a killed run has left unfinished, or that is damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    row.pop("sum", None)
    return row if all(_is_kept(value) for name, value in row.items() if name != "curves") else None


def _is_kept(value: Any) -> bool:
    """Whether it is what `append_metrics` writes: a number, or null for one that was not finite."""
    return value is None or type(value) is int or (type(value) is float and math.isfinite(value))
