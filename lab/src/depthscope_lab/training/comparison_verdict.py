"""What a fair comparison has shown, in words: which variants are best at a depth, which equal it, what to doubt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import pandas as pd

from depthscope.report.formats import FACTORS
from depthscope_lab.training.comparison_results import HIDDEN, evaluated_in, final_values
from depthscope_lab.training.intervals import bootstrap_interval, overlap
from depthscope_lab.training.protocol import Choice

JUDGED = "test_loss"
Row = Mapping[str, Any]


def with_intervals(rows: Sequence[Row], frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Each cell of the summary with NAME_low and NAME_high of its quantities (bootstrap over its seeds) and `judged`.

    None where a run failed or was stopped: where it would have ended is not known, and the others alone would flatter.
    """
    final = final_values(frame)
    found = []
    for row in rows:
        mine = final[[all(one[name] == row[name] for name in FACTORS) for one in final.to_dict("records")]]
        bounds: dict[str, float | None] = {}
        for name in ("loss", *evaluated_in(frame)):
            interval = bootstrap_interval([float(value) for value in mine[name]])
            bounds |= {f"{name}_low": interval and interval[0], f"{name}_high": interval and interval[1]}
        found.append({**row, **bounds, "judged": _judged_by(row)})
    return found


def verdict_of(rows: Sequence[Row], choices: Sequence[Choice]) -> list[str]:
    """The sentences, in the order of their use: who is best, what depth does, what to doubt."""
    return [*_best(rows), *_depths(rows), *_failures(rows), *_edges(choices)]


def ranks(rows: Sequence[Row]) -> dict[int, str]:
    """By place in `rows`: "best" of its depth, "equal" (their intervals overlap), "worse", "" (failed)."""
    found: dict[int, str] = {}
    for places in _by_depth(rows):
        known = [place for place in places if _interval(rows[place]) is not None]
        found |= dict.fromkeys(places, "")
        if not known:
            continue
        first = min(known, key=lambda place: _value(rows[place]))
        for place in known:
            same = overlap(_interval(rows[place]), _interval(rows[first]))
            found[place] = "best" if place == first else "equal" if same else "worse"
    return found


def _best(rows: Sequence[Row]) -> Iterator[str]:
    rank = ranks(rows)
    for places in _by_depth(rows):
        by_rank = {kind: [place for place in places if rank[place] == kind] for kind in ("best", "equal", "worse")}
        if not by_rank["best"]:
            said = "no variant has an interval, as in each some run failed or was stopped"
            yield f"{_where(rows[places[0]], rows)}: {said}."
            continue
        (first,) = by_rank["best"]
        text = f"{_where(rows[first], rows)}: {_number(rows[first])}"
        if by_rank["equal"]:
            text += " is lowest; not distinguishable from it (intervals overlap): " + _list(rows, by_rank["equal"])
        else:
            text += " is best" if by_rank["worse"] else " is the only one"
        if by_rank["worse"]:
            text += "; worse: " + _list(rows, by_rank["worse"])
        yield text + "."


def _depths(rows: Sequence[Row]) -> Iterator[str]:
    """Of every variant with several depths: does the deepest do better than the shallowest?"""
    key = lambda row: (row["variant"], row["warmup_steps"])  # noqa: E731
    for (variant, _), some in groupby(sorted(rows, key=key), key):
        known = sorted((row for row in some if _interval(row) is not None), key=lambda row: row["depth"])
        if len(known) < 2:
            continue
        least, most = known[0], known[-1]
        if overlap(_interval(least), _interval(most)):
            said = "are equal to"
        else:
            said = "are better than" if _value(most) < _value(least) else "are worse than"
        yield (
            f"{variant}: {most['depth']} blocks {said} {least['depth']} "
            f"({_value(most):.3f} against {_value(least):.3f})."
        )


def _failures(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for end, why in (("failed", "failed (a loss that is not finite)"), ("stopped", "were stopped by a rule")):
            if row.get(end):
                yield (
                    f"{row['variant']}, {row['depth']} blocks: {row[end]} of {row['runs']} runs {why}, "
                    "so that it has no interval and no rank."
                )


def _edges(choices: Sequence[Choice]) -> Iterator[str]:
    for edge, other in (("least", "smaller"), ("greatest", "greater")):
        named = [f"{c.config.variant} at {c.config.depth} blocks ({c.lr:g})" for c in choices if c.edge == edge]
        if named:
            yield f"The chosen rate is the {edge} that was tried, and a {other} one may be better: {', '.join(named)}."


def _by_depth(rows: Sequence[Row]) -> list[list[int]]:
    """Places of the rows that are compared with one another."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, row in enumerate(rows):
        found.setdefault((row["depth"], row["warmup_steps"]), []).append(place)
    return list(found.values())


def _judged_by(row: Row) -> str:
    """Without the future, where the model sees it."""
    return f"{JUDGED}{HIDDEN}" if row.get(f"{JUDGED}{HIDDEN}") is not None else JUDGED


def _value(row: Row) -> float:
    return float(row[row["judged"]])


def _interval(row: Row) -> tuple[float, float] | None:
    low, high = row.get(f"{row['judged']}_low"), row.get(f"{row['judged']}_high")
    return None if low is None or high is None else (low, high)


def _where(row: Row, rows: Sequence[Row]) -> str:
    several = len({other["warmup_steps"] for other in rows}) > 1
    return f"{row['depth']} blocks" + (f", warm-up {row['warmup_steps']}" if several else "")


def _number(row: Row) -> str:
    low, high = _interval(row) or (float("nan"),) * 2
    hidden = ", the future hidden" if row["judged"].endswith(HIDDEN) else ""
    return f"{row['variant']} ({_value(row):.3f}, {low:.3f} to {high:.3f}{hidden})"


def _list(rows: Sequence[Row], places: Sequence[int]) -> str:
    return ", ".join(_number(rows[place]) for place in sorted(places, key=lambda place: _value(rows[place])))
