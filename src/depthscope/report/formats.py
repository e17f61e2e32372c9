"""What the files of runs, comparisons and studies hold, as `report` reads them. What trains writes them so.

`metrics.jsonl` of a run: one line of JSON per logged step or evaluation. `curves.parquet` of a comparison: `COLUMNS`.
`claims.json` of a study: a list of `Claim`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from depthscope.files import content_sum, read_json, require_file, require_format
from depthscope.sealed import Record, read_record

METRICS = "metrics.jsonl"
WATCHED = "token_similarity"  # of the last block's tokens, in a step that was watched
FACTORS = ["variant", "depth", "lr", "warmup_steps"]
COLUMNS = [*FACTORS, "seed", "step", "quantity", "value"]
STUDY_FORMAT = 1  # of a study's folder
CHECKPOINT_FORMAT = 2
_CHECKPOINT = re.compile(r"step-(\d{8,})")
ENDS = ("failed", "stopped")  # how a run ended that did not come to its end: a row, no curve

Verdict = Literal["reproduced", "not reproduced", "not testable here"]
Kind = Literal["finding", "check"]


@dataclass(frozen=True)
class Claim:
    """A statement that can fail, with the number it rests on."""

    claim: str
    paper: str  # what the paper says, and where
    ours: str  # what came out, with its number
    tolerance: str  # what would still count as the same, and why
    verdict: Verdict
    note: str = ""
    kind: Kind = "finding"  # or "check": true by construction, so that it tests our code


def read_about(folder: Path) -> Record:
    """What a study's folder says of itself; those of before there was a number are of format 1."""
    return read_record(folder / "config.json", "study", (STUDY_FORMAT,), unnumbered=STUDY_FORMAT)


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first; what was not finished has another name."""
    if not folder.is_dir():
        return []
    return sorted((path for path in folder.iterdir() if _CHECKPOINT.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    """Which step a checkpoint is of, by its name."""
    return int(checkpoint.name.removeprefix("step-"))


def read_state(path: Path) -> dict[str, Any]:
    """What a checkpoint's `state.json` says, as it was written: nothing else has its sum."""
    state = read_json(path)
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError("expected a record with its format")
    require_format(state["format"], (CHECKPOINT_FORMAT,))
    if state.pop("sha256", None) != content_sum(state):
        raise ValueError("its content is not what was written")
    if not isinstance(state.get("files"), dict) or "step" not in state:
        raise ValueError("it does not say its step and its files")
    return state


def folder_name(variant: str) -> str:
    """The variant in the name of a folder: no brackets, no spaces."""
    return re.sub(r"[^\w.+=@-]+", "_", variant).strip("_")


def run_name(variant: str, depth: int, lr: float, warmup: int, seed: int) -> str:
    """The folder of a run of a comparison, but for its part."""
    return f"{folder_name(variant)}-depth{depth}-lr{lr:g}-warmup{warmup}-seed{seed}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a line that a killed run has left unfinished is not there."""
    return [row for row in map(row_of, lines_of(path)) if row is not None]


def evaluated(row: Mapping[str, Any]) -> list[str]:
    """What a task reported in this line, by name; nothing if the line is not of an evaluation.

    The loop's own lines have a learning rate (its log) or the similarity of tokens (a step that was watched).
    """
    return [] if "lr" in row or WATCHED in row else [name for name in row if name != "step"]


def lines_of(path: Path) -> list[str]:
    """None where there is no file."""
    return require_file(path).read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def row_of(line: str) -> dict[str, Any] | None:
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
    """Whether it is a number, or null for one that was not finite."""
    return value is None or type(value) is int or (type(value) is float and math.isfinite(value))
