"""`--fail-on`: a condition on the last block, for scripts that must stop when a model collapses."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from depthscope.naming import did_you_mean

if TYPE_CHECKING:
    from depthscope.probing import Profile

_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_FORM = re.compile(r"\s*([a-z_0-9]+)\s*(>=|<=|>|<)\s*(\S+)\s*")


@dataclass(frozen=True)
class Condition:
    """`measure operator threshold`."""

    measure: str
    comparison: str
    threshold: float

    def holds(self, value: float) -> bool:
        return _OPERATORS[self.comparison](value, self.threshold)

    def __str__(self) -> str:
        return f"{self.measure}{self.comparison}{self.threshold:g}"


def parse_condition(text: str, measured: tuple[str, ...]) -> Condition:
    """Reads `token_similarity>0.95`. `measured` are the measures that this run will take."""
    found = _FORM.fullmatch(text)
    try:
        threshold = float(found[3]) if found else math.nan
    except ValueError:
        threshold = math.nan
    if found is None or math.isnan(threshold):
        raise ValueError(f'expected --fail-on "MEASURE>NUMBER" (or <, >=, <=), got {text!r}')
    if found[1] not in measured:
        raise ValueError(
            f"--fail-on {text!r} asks for {found[1]!r}, which is not measured: {did_you_mean(found[1], measured)}"
            f"choose it with --measures, or take one of {', '.join(measured)}"
        )
    return Condition(found[1], found[2], threshold)


def last_values(profile: Profile, measure: str) -> dict[int, float]:
    """The measure at the last block, or at that of every part, mean over samples (and heads), at `output` or where it
    stands.

    A gate must not pass because there was nothing to compare, so an undefined value is an error.
    """
    rows = profile.frame[profile.frame["measure"] == measure]
    stations = list(rows["station"].unique())
    if "output" in stations:
        stations = ["output"]
    if len(stations) != 1:
        where = f"it stands at {', '.join(stations)}" if stations else "it was not seen in this model"
        raise ValueError(f"expected a measure with one value per block for --fail-on, got {measure!r}: {where}")
    curve = profile.curve(measure, stations[0])
    values = {last: curve[last] for _, last in profile.parts.values()}
    for block, value in values.items():
        if math.isnan(value):
            raise ValueError(f"--fail-on cannot be decided: {measure} is undefined at block {block}")
    return values


def failures(profile: Profile, conditions: list[Condition]) -> list[str]:
    """One sentence per condition that holds."""
    values = [last_values(profile, condition.measure) for condition in conditions]
    return [
        f"{condition} holds: {value:.6g} at block {block}"
        for condition, by_block in zip(conditions, values, strict=True)
        for block, value in by_block.items()
        if condition.holds(value)
    ]
