"""A study that is a fair comparison: `depthscope compare --tune` as one table, and what claims and notes read from it.

The table is that of `training.comparison_results.curves`, of the runs that were judged; and a row of quantity TRIED for
every rate that was tried, with its validation loss (infinite if the run failed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from depthscope.progress import Share
from depthscope.report.formats import COLUMNS
from depthscope_lab.training.comparison import Cell, Launch, last_step
from depthscope_lab.training.comparison_results import curves, summarise
from depthscope_lab.training.config import TrainingConfig
from depthscope_lab.training.protocol import Protocol, best, edge_of, run_protocol

TRIED = "validation_loss_of_a_rate"


def train_fairly(
    configs: Sequence[TrainingConfig], protocol: Protocol, launch: Launch, progress: Share
) -> pd.DataFrame:
    """Chooses the rates, measures, and gives the table. What is in the launch's folder is not trained again."""
    total = len(configs) * protocol.runs_each[1]
    before = 0  # runs of the passes that are complete

    def show(doing: str, done: int, running: Sequence[Cell], of: int) -> None:
        """As a share of all runs there may be; those that no edge asks for are skipped when the measuring begins."""
        nonlocal before
        if doing == "measuring":
            before = total - of
        parts = sum(last_step(cell, launch).get("step", 0) / protocol.steps for cell in running)
        progress(min(1.0, (before + done + parts) / total))
        if done == of and not running and doing != "measuring":
            before += of

    choices, results = run_protocol(configs, protocol, launch, show)
    tried = [
        (choice.config.variant, choice.config.depth, lr, choice.config.warmup_steps, 0, protocol.steps, TRIED, loss)
        for choice in choices
        for lr, loss in sorted(choice.tried.items())
    ]
    return pd.concat([curves(results, launch), pd.DataFrame(tried, columns=COLUMNS)], ignore_index=True)


def measured(frame: pd.DataFrame) -> pd.DataFrame:
    """The runs that were judged, without those that chose."""
    return frame[frame["quantity"] != TRIED]


def ranked(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A row per variant and depth: means, ranges over the seeds, `rank`, `edge`.

    `rank`, at its depth: "best", "equal" (its range overlaps that of the best), "worse", "" (a run failed). `edge` is
    "least" or "greatest" if the chosen rate is the last of those that were tried; else "".
    """
    rows = summarise(measured(frame))
    edges = {pair: edge_of(losses, best(losses)) for pair, losses in tried_rates(frame).items()}
    for row in rows:
        row["edge"] = edges.get((row["variant"], row["depth"]), "")
        known = [one for one in rows if one["depth"] == row["depth"] and one.get("test_loss_low") is not None]
        first = min(known, key=lambda one: one["test_loss"], default=None)
        if first is None or row not in known:
            row["rank"] = ""
        else:
            overlap = row["test_loss_low"] <= first["test_loss_high"]
            row["rank"] = "best" if row is first else "equal" if overlap else "worse"
    return rows


def tried_rates(frame: pd.DataFrame) -> dict[tuple[str, int], dict[float, float]]:
    """By variant and depth: rate → validation loss."""
    own = frame[frame["quantity"] == TRIED]
    return {
        (str(variant), int(str(depth))): dict(zip(rates["lr"].astype(float), rates["value"].astype(float), strict=True))
        for (variant, depth), rates in own.groupby(["variant", "depth"], sort=False)
    }


def with_bounds(row: Mapping[str, Any], name: str = "test_loss") -> str:
    """`1.234 (1.200 to 1.300)`: mean and range, of a row of `ranked`."""
    if row.get(name) is None:
        return "all runs failed"
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return f"{row[name]:.3f}" + ("" if low is None else f" ({low:.3f} to {high:.3f})")


def rates_in_words(rows: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """The chosen rates; one at the edge of its grid is said to be there."""
    return ", ".join(
        f"{labels.get(row['variant'], row['variant'])} {row['lr']:g}"
        + (f" (the {row['edge']} that was tried)" if row["edge"] else "")
        for row in rows
    )
