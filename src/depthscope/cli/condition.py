"""`--fail-on`: conditions on a profile, for scripts that must stop when a model collapses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from depthscope.conditions import Condition, asked_blocks, find, parse_condition, station_of

if TYPE_CHECKING:
    from depthscope.probing import Profile

OPTION = "--fail-on"


def parse_fail_on(text: str, measured: tuple[str, ...]) -> Condition:
    """Reads `token_similarity>0.95`. `measured` are the measures that this run will take."""
    return parse_condition(text, measured, OPTION)


def values_asked(profile: Profile, condition: Condition) -> dict[int, float]:
    """The condition's measure by block, mean over samples (and heads), at the station where it is asked.

    A gate must not pass because there was nothing to compare, so an undefined value where it is asked is an error.
    """
    rows = profile.frame[profile.frame["measure"] == condition.measure]
    station = station_of(condition, [str(name) for name in rows["station"].unique()])
    there = sorted(int(block) for block in rows.loc[rows["station"] == station, "block"].unique())
    curve = profile.curve(condition.measure, station)
    asked = asked_blocks(condition, there, _lasts(profile))
    for block in asked:
        if math.isnan(curve[block]):
            raise ValueError(f"{OPTION} cannot be decided: {condition.measure} is undefined at block {block}")
    if not asked:
        raise ValueError(f"{OPTION} cannot be decided: {condition.measure} is in no block")
    return {block: curve[block] for block in there}


def failures(profile: Profile, conditions: list[Condition]) -> list[str]:
    """One sentence per condition that holds; at the last block, one per part."""
    values = [values_asked(profile, condition) for condition in conditions]
    return [
        f"{condition} holds: {found.value:.6g} {found.where}"
        for condition, by_block in zip(conditions, values, strict=True)
        for lasts in ([[last] for last in _lasts(profile)] if condition.blocks == "last" else [_lasts(profile)])
        if (found := find(condition, by_block, lasts)) is not None
    ]


def _lasts(profile: Profile) -> list[int]:
    return [last for _, last in profile.parts.values()]
