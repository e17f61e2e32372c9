"""What `depthscope compare --tune` has shown, in words: who is best at a depth, who is not separated, what to doubt.

A ranking is claimed where it can be: with eight seeds or more, and against models of the least depth that was trained.
These are the baselines. A deeper variant that does not beat the best of them has not learned to use its depth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from depthscope_lab.fair.separation import Standing, standings
from depthscope_lab.training.comparison_results import HIDDEN, final_values
from depthscope_lab.training.protocol import Choice

JUDGED = "test_loss"
SEEDS = 8  # of three or five, a paired difference hardly ever is told from chance
Row = Mapping[str, Any]


def verdict_of(
    rows: Sequence[Row], frame: pd.DataFrame, choices: Sequence[Choice]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The cells of `summarise`, each with `judged` (the name of its loss) and `rank`; and the sentences.

    `rank`: "best", "not separated", "worse", "not learned", "died", "baseline"; "" where no ranking is claimed.
    """
    losses: dict[int, dict[str, dict[int, float]]] = {}  # depth → variant → seed → loss
    judged = {(row["variant"], row["depth"]): f"{JUDGED}{HIDDEN}" for row in rows if row.get(f"{JUDGED}{HIDDEN}")}
    for run in final_values(frame).to_dict("records"):  # without the future, where the model sees it
        value = float(run[judged.get((run["variant"], run["depth"]), JUDGED)])
        of_variant = losses.setdefault(run["depth"], {}).setdefault(run["variant"], {})
        of_variant[run["seed"]] = value if math.isfinite(value) else math.inf
    shallow, *deeper = sorted(losses)
    seeds = min(len(of) for at in losses.values() for of in at.values())
    ranks: dict[tuple[str, int], str] = {}
    if seeds < SEEDS:
        said = [f"No ranking is claimed: {seeds} seeds hardly ever separate variants; --seeds {SEEDS} can."]
    elif not deeper:
        said = ["No ranking is claimed: no shallower model was trained that a variant would have to beat (--depths)."]
    else:
        said = []
        flat = {f"{name} with {shallow}": of for name, of in losses[shallow].items()}
        ranks = {(name, shallow): "baseline" for name in losses[shallow]}
        for depth in deeper:
            tests = 2 * sum(len(losses[other]) for other in deeper if other != depth)
            found = standings({**losses[depth], **flat}, list(flat), tests)
            ranks |= {(one.variant, depth): one.standing for one in found if one.variant not in flat}
            said.append(f"{depth} blocks: {'; '.join(_in_words(found))}.")
    said += [*_ended_early(rows), *_at_an_edge(choices)]
    cells = []
    for row in rows:
        place = row["variant"], row["depth"]
        cells.append({**row, "judged": judged.get(place, JUDGED), "rank": ranks.get(place, "")})
    return cells, said


def _in_words(found: Sequence[Standing]) -> Iterator[str]:
    bar = next(one for one in found if one.standing == "baseline")  # they come from the least loss up
    for standing, said in (
        ("best", "{} is best"),
        ("not separated", "not separated from it: {}"),
        ("worse", "worse: {}"),
        ("not learned", f"not better than {bar.variant} blocks ({bar.loss:.3f}): {{}}"),
        ("died", "with a run that failed or was stopped: {}"),
    ):
        names = []
        for one in found:
            if one.standing == standing:
                gap = "" if one.to_best is None else f", by {one.to_best.low:+.3f} to {one.to_best.high:+.3f}"
                names.append(one.variant if standing == "died" else f"{one.variant} ({one.loss:.3f}{gap})")
        if names:
            yield said.format(", ".join(names))


def _ended_early(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        for end, why in (("failed", "failed (a loss that is not finite)"), ("stopped", "were stopped by a rule")):
            if row.get(end):
                yield f"{row['variant']}, {row['depth']} blocks: {row[end]} of {row['runs']} runs {why}."


def _at_an_edge(choices: Sequence[Choice]) -> Iterator[str]:
    for edge, other in (("least", "smaller"), ("greatest", "greater")):
        named = [f"{c.config.variant} at {c.config.depth} blocks ({c.lr:g})" for c in choices if c.edge == edge]
        if named:
            yield f"The chosen rate is the {edge} that was tried, and a {other} one may be better: {', '.join(named)}."
