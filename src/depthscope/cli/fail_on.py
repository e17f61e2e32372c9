"""`--fail-on`: conditions on a profile, for scripts that must stop when a model collapses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from depthscope.conditions import Condition, asked_blocks, find, station_of

if TYPE_CHECKING:
    from depthscope.probing import Profile

OPTION = "--fail-on"


def failures(profile: Profile, conditions: list[Condition]) -> Iterator[str]:
    """One sentence per condition that holds; at the last block, one per part."""
    lasts = [last for _, last in profile.parts.values()]
    for condition in conditions:
        values = _values(profile, condition, lasts)
        for last in [[last] for last in lasts] if condition.blocks == "last" else [lasts]:
            if (found := find(condition, values, last)) is not None:
                yield f"{condition} holds: {found.value:.6g} {found.where}"


def _values(profile: Profile, condition: Condition, lasts: list[int]) -> dict[int, float]:
    """The condition's measure by block, mean over samples (and heads), at the station where it is asked.

    A gate must not pass because there was nothing to compare, so an undefined value where it is asked is an error.
    """
    rows = profile.frame[profile.frame["measure"] == condition.measure]
    station = station_of(condition, [str(name) for name in rows["station"].unique()])
    there = sorted(int(block) for block in rows.loc[rows["station"] == station, "block"].unique())
    curve = profile.curve(condition.measure, station)
    asked = asked_blocks(condition, there, lasts)
    if undefined := [block for block in asked if math.isnan(curve[block])]:
        raise ValueError(f"{OPTION} cannot be decided: {condition.measure} is undefined at block {undefined[0]}")
    if not asked:
        raise ValueError(f"{OPTION} cannot be decided: {condition.measure} is in no block")
    return {block: curve[block] for block in there}
