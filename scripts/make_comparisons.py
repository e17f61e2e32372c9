"""Writes what `depthscope.diagnosis` knows of trained remedies, from the results of the study `remedies`.

depthscope reproduce remedies --out results
python scripts/make_comparisons.py results/remedies     # also prints each depth as a table
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from depthscope_lab.papers.fair import ranked
from depthscope_lab.training.variants import label_of

TARGET = Path(__file__).parents[1] / "src/depthscope/diagnosis/comparisons/remedies.json"


def main() -> None:
    folder = Path(sys.argv[1])
    frame = pd.read_parquet(folder / "data.parquet")
    rows = ranked(frame)
    made_with = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = {
        "study": "remedies",
        "task": f"digits, width {made_with['settings']['width']}",
        "seeds": made_with["trials"],
        "depths": {str(depth): _stage(rows, depth) for depth in sorted({row["depth"] for row in rows})},
    }
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for depth, stage in found["depths"].items():
        print(f"\n| {depth} blocks | test loss | rate |  |\n| --- | --- | --- | --- |")
        for name, one in stage.items():
            edge = f" ({one['edge']} tried)" if one["edge"] else ""
            print(f"| `{name}` | {_bounds(one)} | {one['lr']:g}{edge} | {one['rank']} |")


def _stage(rows: list[dict[str, Any]], depth: int) -> dict[str, Any]:
    """The variants of a depth, the best first."""
    own = [row for row in rows if row["depth"] == depth]
    own.sort(key=lambda row: float("inf") if row["test_loss"] is None else row["test_loss"])
    return {
        row["variant"]: {
            "label": label_of(row["variant"]),
            "loss": _short(row["test_loss"]),
            "low": _short(row["test_loss_low"]),
            "high": _short(row["test_loss_high"]),
            "lr": row["lr"],
            "edge": row["edge"],
            "rank": row["rank"],
        }
        for row in own
    }


def _bounds(one: dict[str, Any]) -> str:
    return "a run failed" if one["low"] is None else f"{one['loss']:.3f} ({one['low']:.3f} to {one['high']:.3f})"


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


if __name__ == "__main__":
    main()
