"""`metrics.jsonl`: one line of JSON per logged step or evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from depthscope.files import write_whole

WATCHED = "token_similarity"  # of the last block's tokens, in a step that was watched


def append_metrics(path: Path, step: int, values: Mapping[str, float]) -> None:
    """What is not finite is null: JSON knows neither nan nor infinity."""
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **finite}) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a line that a killed run has left unfinished is not there."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def evaluated(row: Mapping[str, Any]) -> list[str]:
    """What a task reported in this line, by name; nothing if the line is not of an evaluation.

    The loop's own lines have a learning rate (its log) or the similarity of tokens (a step that was watched).
    """
    return [] if "lr" in row or WATCHED in row else [name for name in row if name != "step"]


def keep_metrics_until(path: Path, step: int) -> None:
    """Drops what a run wrote after the checkpoint from which it is continued: it will be computed again."""
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    lines = "".join(json.dumps(row) + "\n" for row in kept)
    write_whole(path, lambda scratch: scratch.write_text(lines, encoding="utf-8"))
