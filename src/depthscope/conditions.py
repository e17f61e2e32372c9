"""Conditions on measures, as gates ask for them: `probe --fail-on`, `watch(stop_if=…)`, `train --stop-if`. One parser.

    token_similarity>0.95                          of a profile: at the last block (of some part, if there are several);
                                                   while a model trains: in half of the blocks
    token_similarity>0.99 for 3                    at three looks in a row, while a model trains
    token_similarity>0.99 for 3 after 500          the same, and nothing is said before step 500
    effective_rank<2 at block 12                   at a block, counted from 1; 0 is what enters block 1
    effective_rank<2 at the last block             at the last one, whoever asks
    cosine_similarity>0.9 in half of the blocks    in at least half of them; also: in any block, in all blocks
    token_similarity>0.99 at after_ffn             at another station than the block's output

What follows the number may come in any order, each once. There is no "and": several conditions are a list, and
any of them is enough.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from depthscope import stations
from depthscope.naming import did_you_mean

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([a-z_0-9]+)\s*(>=|<=|>|<)\s*(\S+)(\s.*)?", flags=re.DOTALL)
_CLAUSES = {
    "block": re.compile(r"\s+at\s+block\s+(\d{1,9})(?=\s|$)"),
    "range": re.compile(
        r"\s+(in\s+any\s+block|in\s+half\s+of\s+the\s+blocks|in\s+all\s+blocks|at\s+the\s+last\s+block)(?=\s|$)"
    ),
    "looks": re.compile(r"\s+for\s+(\d{1,9})(?=\s|$)"),
    "after": re.compile(r"\s+after\s+(\d{1,9})(?=\s|$)"),
    "station": re.compile(r"\s+at\s+(?!block(?:\s|$))([a-z_]+)(?=\s|$)"),
}
Blocks = int | Literal["last", "any", "half", "all"]
_PLACES: dict[str, Blocks] = {
    "at the last block": "last",
    "in any block": "any",
    "in half of the blocks": "half",
    "in all blocks": "all",
}
_GRAMMAR = (
    '"MEASURE>NUMBER" (or <, >=, <=), then, if wanted, "at block 12", "at the last block", "in any block", '
    '"in half of the blocks" or "in all blocks"; "at STATION"'
)

_CHOOSE = {  # how a measure is taken that is not
    "--fail-on": "choose it with --measures, or ",
    "stop_if=": "choose it with measures=, or ",
    "warn_if=": "choose it with measures=, or ",
}


@dataclass(frozen=True)
class Condition:
    """`measure comparison threshold`, asked of some blocks at a station (None: the output, or where the measure
    stands), and of how many looks in a row. Nothing is said before step `after` (None: as the gate's default is)."""

    measure: str
    comparison: str
    threshold: float
    blocks: Blocks = "last"
    station: str | None = None
    looks: int = 1
    after: int | None = None

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.comparison](value, self.threshold)

    def __str__(self) -> str:
        where = next((text for text, blocks in _PLACES.items() if blocks == self.blocks), f"at block {self.blocks}")
        station = "" if self.station is None else f"at {self.station}"
        looks = "" if self.looks == 1 else f"for {self.looks}"
        after = "" if self.after is None else f"after {self.after}"
        rule = f"{self.measure}{self.comparison}{self.threshold:.15g}"
        return " ".join(filter(None, (rule, where, station, looks, after)))


@dataclass(frozen=True)
class Finding:
    """Where a condition holds: the block to name, its value, the place in words, and in how many of the blocks."""

    block: int
    value: float
    where: str
    held: int = 1
    asked: int = 1


def parse_condition(text: str, measured: Iterable[str] | None, asked_by: str, *, in_a_row: bool = False) -> Condition:
    """Reads `token_similarity>0.99 for 3`. `measured` are the measures that this run will take (None: not known yet),
    `asked_by` is the option, for errors. Where there are several looks (`in_a_row`: a model trains), "for K" and "after
    STEP" may be said, and without a place half of the blocks are asked; else the last one is."""
    from depthscope.measures import MEASURES  # and with them torch, which a mistyped command does not wait for

    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    try:
        threshold = float(found[3]) if found else math.nan
    except ValueError:
        threshold = math.nan
    clauses = _clauses(found[4] or "") if found else None
    if found is None or math.isnan(threshold) or clauses is None:
        grammar = _GRAMMAR + ('; "for 3" (looks in a row); "after 500" (steps)' if in_a_row else "")
        raise ValueError(f"expected {asked_by} {grammar}; got {text!r}")
    names = None if measured is None else tuple(measured)
    measure = {MEASURES[name].short: name for name in MEASURES.ours()}.get(found[1], found[1])
    if names is not None and measure not in names:
        raise ValueError(
            f"{asked_by} {text!r} asks for {found[1]!r}, which is not measured: {did_you_mean(found[1], names)}"
            f"{_CHOOSE.get(asked_by, '')}take one of {', '.join(names)}"
        )
    never = threshold > 1 if found[2].startswith(">") else threshold < -1
    if never and measure in MEASURES.ours() and MEASURES[measure].is_share:
        raise ValueError(f"expected {asked_by} with a number that {measure} can pass, 0 to 1, got {text!r}")
    if (station := clauses.get("station")) is not None and station not in stations.ALL:
        hint = did_you_mean(station, stations.ALL)
        raise ValueError(f"{asked_by} {text!r}: {hint}expected a station, one of {', '.join(stations.ALL)}")
    looks = int(clauses.get("looks", "1"))
    if "looks" in clauses and (looks < 1 or not in_a_row):
        reason = "1 or more looks in a row" if in_a_row else 'no "for": there is one look only'
        raise ValueError(f"expected {asked_by} with {reason}, got {text!r}")
    if "after" in clauses and not in_a_row:
        raise ValueError(f'expected {asked_by} with no "after": there is one look only, got {text!r}')
    after = int(clauses["after"]) if "after" in clauses else None
    # A healthy model's last block may be alike for a while as it begins to learn; half of its blocks are not.
    blocks: Blocks = "half" if in_a_row else "last"
    if "block" in clauses:
        blocks = int(clauses["block"])
    elif "range" in clauses:
        blocks = _PLACES[" ".join(clauses["range"].split())]
    return Condition(measure, found[2], threshold, blocks, station, looks, after)


def _clauses(text: str) -> dict[str, str] | None:
    """What follows the number, by kind; None if it is something else, or there twice."""
    found: dict[str, str] = {}
    text = text.rstrip()
    while text:
        for kind, form in _CLAUSES.items():
            if kind not in found and (match := form.match(text)):
                found[kind], text = match[1], text[match.end() :]
                break
        else:
            return None
    return None if {"block", "range"} <= found.keys() else found


def station_of(condition: Condition, there: Sequence[str], preferred: Sequence[str] = ("output",)) -> str:
    """Where the condition is asked, of the stations at which its measure stands: as it says, else at the first that is
    preferred, else at the only one."""
    named = [condition.station] if condition.station is not None else list(preferred)
    if chosen := next((station for station in named if station in there), None):
        return chosen
    if condition.station is None and len(there) == 1:
        return there[0]
    where = f"it stands at {', '.join(there)}" if there else "it was not seen in this model"
    wanted = "one value per block" if condition.station is None else f"a value at {condition.station}"
    raise ValueError(f'expected a measure with {wanted} for "{condition}", got {condition.measure!r}: {where}')


def asked_blocks(condition: Condition, there: Sequence[int], lasts: Sequence[int]) -> list[int]:
    """The blocks that are asked, of those that have the measure; `lasts` are the last ones of the parts."""
    if condition.blocks == "last":
        return list(lasts)
    if isinstance(condition.blocks, str):
        return [block for block in there if block > 0]
    if condition.blocks > (last := max(there, default=0)):
        raise ValueError(f'"{condition}" asks for block {condition.blocks}, and the last one is {last}')
    return [condition.blocks]


def find(condition: Condition, values: Mapping[int, float], lasts: Sequence[int]) -> Finding | None:
    """Where the condition holds, or None. `values` are those of the blocks; one that is missing or nan holds: a gate
    must not stay open because there was nothing to compare. Whoever thinks otherwise refuses nan before."""
    asked = asked_blocks(condition, sorted(values), lasts)
    taken = {block: values.get(block, math.nan) for block in asked}
    held = [block for block, value in taken.items() if math.isnan(value) or condition.holds(value)]
    needed = {"half": (len(asked) + 1) // 2, "all": len(asked)}.get(str(condition.blocks), 1)
    if asked and len(held) < needed:
        return None
    if not asked:
        return Finding(max(lasts, default=0), math.nan, "in no block")
    where = f"at block {held[0]}"
    if isinstance(condition.blocks, int) or condition.blocks == "last":
        return Finding(held[0], taken[held[0]], where)
    where += f", the first of {len(held)} of {len(asked)} blocks"
    return Finding(held[0], taken[held[0]], where, len(held), len(asked))
