"""Writing `metrics.jsonl`, whose lines `depthscope.report` reads: one of JSON per logged step or evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthscope.files import write_whole
from depthscope.report.formats import METRICS_KIND, WATCHED, lines_of, row_of
from depthscope.sealed import append_sealed


def append_metrics(path: Path, step: int, values: Mapping[str, float]) -> None:
    """What is not finite is null: JSON knows neither nan nor infinity."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    append_sealed(path, METRICS_KIND, json.dumps({"step": step, **finite}) + "\n")


def keep_until(path: Path, step: int) -> int:
    """Drops what a run wrote after the checkpoint of a step, which will be computed again; 0: all of it.

    Of `metrics.jsonl` or of what `depthscope.watch` wrote. A step that was watched has the number of updates before
    it: that of the checkpoint's own number came after the checkpoint. Returns how many lines in between cannot be read.
    """
    lines = lines_of(path)
    rows = [row_of(line) for line in lines]
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
