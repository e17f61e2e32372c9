"""`metrics.jsonl`, whose lines `depthscope.report` reads: one of JSON per logged step or evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from depthscope.files import append_line, write_text, write_whole
from depthscope.report.formats import WATCHED, lines_of, row_of


def append_metrics(path: Path, step: int, values: Mapping[str, float]) -> None:
    """What is not finite is null: JSON knows neither nan nor infinity."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    append_line(path, json.dumps({"step": step, **finite}) + "\n")


def keep_until(path: Path, step: int) -> int:
    """Drops what a run wrote after the checkpoint of a step, which will be computed again; 0: all of it.

    Of `metrics.jsonl` or of what `depthscope.watch` wrote. A step that was watched has the number of updates before
    it: that of the checkpoint's own number came after the checkpoint. Returns how many lines in between cannot be read.
    """
    kept, damaged = [], 0
    lines = lines_of(path)
    for number, line in enumerate(lines, start=1):
        row = row_of(line)
        if row is None:
            damaged += number < len(lines)  # the last one was torn by a kill
        elif row["step"] < step or (row["step"] == step > 0 and WATCHED not in row and "curves" not in row):
            kept.append(line + "\n")
    if kept:
        write_whole(path, lambda scratch: write_text(scratch, "".join(kept)))
    else:
        path.unlink(missing_ok=True)
    return damaged
