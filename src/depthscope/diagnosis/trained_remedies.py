"""What trained best at about this depth: the study `remedies`, as `scripts/make_comparisons.py` wrote it down."""

from __future__ import annotations

import json
import math
from functools import cache
from importlib.resources import files
from typing import Any

COMPARED = ("deescalated", "pre", "post")  # what is said besides the best
MOST = 3  # of those that are equally good, so many are named


def trained_at(depth: int) -> str:
    """One sentence on what was trained at the nearest depth (in logarithms), small as it was."""
    found = _comparison()
    near = min(map(int, found["depths"]), key=lambda one: abs(math.log(one / depth)))
    variants: dict[str, Any] = found["depths"][str(near)]
    best = [name for name, one in variants.items() if one["rank"] in ("best", "equal")][:MOST]
    others = [name for name in COMPARED if name not in best]
    return (
        f"Of {len(variants)} wirings and remedies trained side by side with {near} blocks ({found['task']}, "
        f"{found['seeds']} seeds), the least test loss had {_listed(variants, best)}; {_listed(variants, others)}"
    )


def _listed(variants: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{variants[name]['label']} {_loss(variants[name]['loss'])}" for name in names)


def _loss(value: float | None) -> str:
    return "failed" if value is None else f"{value:.2f}"


@cache
def _comparison() -> dict[str, Any]:
    path = files("depthscope.diagnosis") / "comparisons" / "remedies.json"
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
