"""What the runs of a comparison have shown: one tidy table, and the numbers at their ends."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd

from depthscope.report.formats import COLUMNS, ENDS, FACTORS, METRICS, WATCHED, evaluated, read_metrics
from depthscope_lab.training.comparison import Launch, Result

HIDDEN = "_future_hidden"  # of a model that sees the future: the only loss of it that can be compared with others'
OURS = ("test_loss", f"test_loss{HIDDEN}", "test_accuracy", "valid_loss", f"valid_loss{HIDDEN}")  # first, in this order
FOLLOWING = tuple(f"{which}_perplexity{end}" for which in ("valid", "test") for end in ("", HIDDEN))  # exp of a loss
OF_THE_LOOP = ("loss", WATCHED, *ENDS)  # all other quantities were reported by the task
LAST_SHARE = 0.1  # of a run: its final training loss is the mean over it


def curves(results: Sequence[Result], launch: Launch) -> pd.DataFrame:
    """A row for every logged number: variant, depth, lr, warmup_steps, seed, step, quantity, value.

    The quantities are the training loss, whatever the task reported of an evaluation, and the similarity of tokens.
    A run whose loss ceased to be finite has a row of quantity `failed` at its last logged step, one that a rule has
    ended a row `stopped`.
    """
    rows = []
    for result in results:
        factors = [getattr(result.cell.config, name) for name in (*FACTORS, "seed")]
        logged = read_metrics(launch.run_folder(result.cell) / METRICS)
        for end in ENDS:
            if getattr(result, end) is not None:
                rows.append([*factors, max((int(row["step"]) for row in logged), default=0), end, 1.0])
        for row in logged:
            for name in (*(name for name in ("loss", WATCHED) if name in row), *_ordered(evaluated(row))):
                value = math.nan if row[name] is None else float(row[name])
                rows.append([*factors, int(row["step"]), name, value])
    return pd.DataFrame(rows, columns=COLUMNS)


def final_values(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per run: the training loss over the last tenth of its steps, and its last evaluation.

    nan for a run that failed or was stopped: what it had before is not where the others ended.
    """
    rows = []
    for key, run in frame.groupby([*FACTORS, "seed"], sort=False):
        if run["quantity"].isin(ENDS).any():
            run = run[:0]
        losses = run[run["quantity"] == "loss"]
        late = losses[losses["step"] > (1 - LAST_SHARE) * losses["step"].max()]
        found: dict[str, Any] = {**dict(zip([*FACTORS, "seed"], key, strict=True)), "loss": late["value"].mean()}
        for name in evaluated_in(frame):
            values = run.loc[run["quantity"] == name].sort_values("step")["value"]
            found[name] = values.iloc[-1] if len(values) else math.nan
        rows.append(found)
    return pd.DataFrame(rows, columns=[*FACTORS, "seed", "loss", *evaluated_in(frame)])


def evaluated_in(frame: pd.DataFrame) -> list[str]:
    """What these runs have measured on data they were not trained on."""
    return _ordered(name for name in frame["quantity"].unique() if name not in OF_THE_LOOP)


def summarise(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Per variant, depth, learning rate and warm-up: mean, standard deviation, least and greatest value over the seeds.

    A run whose loss ceased to be finite counts in `failed`, one that a rule has ended in `stopped`, and neither in a
    mean: runs of other lengths are not comparable. NAME_low and NAME_high are None then. `best_lr` is true for the
    learning rate with the least mean final *training* loss among those of the same variant, depth and warm-up: the
    test data chooses nothing.
    """
    final = final_values(frame)
    rows: list[dict[str, Any]] = []
    for factors, chosen in final.groupby(FACTORS, sort=False):
        found: dict[str, Any] = dict(zip(FACTORS, factors, strict=True))
        of_cell = (frame[FACTORS] == list(factors)).all(axis=1)
        for end in ENDS:  # a run has at most one row of each
            found[end] = int((frame.loc[of_cell, "quantity"] == end).sum())
        found["runs"] = len(chosen)
        for name in ("loss", *evaluated_in(frame)):
            values = chosen[name]
            found[name] = _finite(values.mean())
            found[f"{name}_std"] = _finite(values.std())  # of one run there is none
            found[f"{name}_low"] = _finite(values.min(skipna=False))
            found[f"{name}_high"] = _finite(values.max(skipna=False))
        rows.append(found)
    for row in rows:
        rivals = [other for other in rows if all(other[name] == row[name] for name in FACTORS if name != "lr")]
        row["best_lr"] = row is min(rivals, key=_order)
    return rows


def _ordered(names: Iterable[str]) -> list[str]:
    """Ours first, then others as they came."""
    found = [name for name in names if name not in FOLLOWING]
    return [*(name for name in OURS if name in found), *(name for name in found if name not in OURS)]


def _order(row: dict[str, Any]) -> tuple[int, float]:
    """Most runs that came to their end first, then the training loss; what has none is last."""
    return sum(row[end] for end in ENDS), math.inf if row["loss"] is None else row["loss"]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
