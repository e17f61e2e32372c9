"""What a watch writes down: one record per watched step, as a line of JSON, a tidy table, or a few scalars."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope.files import append_line
from depthscope.measures import ALIKE, MEASURES
from depthscope.probing.readings import Reading
from depthscope.probing.roles import OF_GRADIENTS, gradient_scalars
from depthscope.sealed import require_whole_log
from depthscope.watching.gate import Means

COLUMNS = ["step", "block", "station", "measure", "value"]

Curves = dict[str, dict[str, list[float]]]  # station → measure → values of blocks 0..L


@dataclass(frozen=True)
class Record:
    """The curves of one training step: station → measure → values of blocks 0..L, means over the batch.

    Block 0 is what enters block 1, and stands at station `output`. A value that has no meaning, or was not
    taken there, is nan.
    """

    step: int
    curves: Curves

    def scalars(self) -> dict[str, float]:
        """A handful of numbers for a tracker.

        | name                        | meaning                                                               |
        | --------------------------- | --------------------------------------------------------------------- |
        | `depth/t_sim_last`          | the last block's value; so for every measure (t_cos, t_div, …)        |
        | `depth/t_sim_max`           | the largest over blocks 1..L; similarities only                       |
        | `depth/t_sim_passes_0.9`    | the first block whose output has .9 or more (0: the input has); or nan |
        | `depth/effective_depth`     | how many blocks read tokens that are not alike: t_sim (and t_cos, if  |
        |                             | taken) of their input < .9; L if nothing collapses                    |
        | `depth/attention_learns`    | with gradients: how many blocks' attention can learn                  |
        | `depth/coherent_share_max`  | with gradients: the largest mean-coherent share of a writer           |

        At a station other than `output` the names are `depth/<station>/…`, and the last two are missing.
        """
        found: dict[str, float] = {}
        for station, curves in self.curves.items():
            prefix = "depth/" if station == "output" else f"depth/{station}/"
            for measure, values in curves.items():
                if len(values) < 2 or measure in OF_GRADIENTS:
                    continue  # block 0 alone: this station was not asked for
                name = prefix + ((measure in MEASURES and MEASURES[measure].short) or measure)
                found[f"{name}_last"] = values[-1]
                if measure.endswith("similarity"):
                    found[f"{name}_max"] = max((v for v in values[1:] if not math.isnan(v)), default=math.nan)
        output = self.curves.get("output", {})
        if len(similarity := output.get("token_similarity", [])) > 1:
            first = next((block for block, value in enumerate(similarity) if value >= ALIKE), math.nan)
            similarities = [output[name] for name in ("token_similarity", "cosine_similarity") if name in output]
            read = list(zip(*similarities, strict=True))[:-1]  # what blocks 1..L read
            found[f"depth/t_sim_passes_{ALIKE}"] = float(first)
            found["depth/effective_depth"] = float(sum(all(value < ALIKE for value in values) for values in read))
        return found | gradient_scalars(self.curves)

    def with_gradients(self, curves: Curves) -> Record:
        """The same with what the backward pass gave."""
        stations = {*self.curves, *curves}
        return Record(self.step, {s: self.curves.get(s, {}) | curves.get(s, {}) for s in stations})

    def line(self) -> str:
        """Strict JSON (nan and infinity are null), ending with a newline."""
        curves = {
            station: {name: [v if math.isfinite(v) else None for v in values] for name, values in measures.items()}
            for station, measures in self.curves.items()
        }
        return json.dumps({"step": self.step, "curves": curves}, allow_nan=False) + "\n"

    @classmethod
    def parse(cls, line: str) -> Record:
        """Reads what `line` wrote; ValueError if it is something else."""
        try:
            content = json.loads(line)
            curves = {
                station: {name: [_value(v) for v in values] for name, values in measures.items()}
                for station, measures in content["curves"].items()
            }
            if type(content["step"]) is not int:
                raise TypeError("a step is a whole number")
            return cls(content["step"], curves)
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError):
            raise ValueError(f"not a record of a watched step: {line[:60]!r}") from None


def _value(written: Any) -> float:
    """A number that `Record.line` wrote; float() would also take texts, true and 1e999."""
    if written is None:
        return math.nan
    if type(written) not in (int, float) or not math.isfinite(value := float(written)):
        raise ValueError(f"expected a finite number or null, got {written!r}")
    return value


def means_of(rows: Sequence[Reading]) -> Means:
    """The mean over the batch of every measure at every block that has it; nan sequences are left out of it."""
    means: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows:
        values = [value for value in row.values if not math.isnan(value)]
        mean = sum(values) / len(values) if values else math.nan
        means.setdefault(row.station, {}).setdefault(row.measure, {})[row.block] = mean
    return means


def by_block(curves: Curves) -> Means:
    """Curves of blocks 0..L by block, without what was not taken."""
    return {
        station: {
            name: {block: value for block, value in enumerate(values) if not math.isnan(value)}
            for name, values in measures.items()
        }
        for station, measures in curves.items()
    }


def curves_of(means: Means) -> Curves:
    """Block after block; nan where a block has none."""
    order = list(MEASURES)
    return {
        station: {
            name: [measures[name].get(block, math.nan) for block in range(max(measures[name]) + 1)]
            for name in sorted(measures, key=[*order, *measures].index)
        }
        for station, measures in means.items()
    }


def frame_of_records(records: Sequence[Record]) -> pd.DataFrame:
    """step, block, station, measure, value: one row per number."""
    rows = [
        (record.step, block, station, measure, value)
        for record in records
        for station, measures in record.curves.items()
        for measure, values in measures.items()
        for block, value in enumerate(values)
    ]
    return pd.DataFrame(rows, columns=COLUMNS).astype(
        {"step": "int64", "block": "int64", "station": object, "measure": object, "value": "float64"}
    )


def load_records(path: str | os.PathLike[str]) -> pd.DataFrame:
    """The table of a file that `watch(path=…)` wrote. A step that was run again after a restart counts once,
    as it was run last."""
    require_whole_log(Path(path))
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    # Without its newline the last line is still being written, or a crash has cut it.
    records = [Record.parse(line) for line in lines if line.endswith("\n")]
    latest = {record.step: record for record in records}
    return frame_of_records([latest[step] for step in sorted(latest)])


def check_appendable(path: Path) -> None:
    """Refuses a file that is not of a watch, and cuts off a last line that a crash has left unfinished."""
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: the folder {path.parent} does not exist")
    if path.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; give the path of a file")
    if not path.exists() or path.stat().st_size == 0:
        return
    text = path.read_bytes()
    whole = text.rfind(b"\n") + 1
    try:
        Record.parse(text[:whole].partition(b"\n")[0].decode("utf-8") if whole else text.decode("utf-8"))
    except ValueError:
        raise ValueError(f"{path} exists and holds no records of a watch: choose another path") from None
    if whole < len(text):
        os.truncate(path, whole)


def append(path: Path, record: Record) -> None:
    """Adds one line in one write; if it fails (a full disk), the file stays as it was, and OSError is raised."""
    append_line(path, record.line())
