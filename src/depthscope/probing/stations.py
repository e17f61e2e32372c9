"""The stations that users ask for, and those that must be heard to answer them."""

from __future__ import annotations

from collections.abc import Sequence

from depthscope.models.block import STATIONS, TRUNK_STATIONS
from depthscope.probing.reduction import Reduction

CROSS_STATIONS = ("after_cross_attention", "cross_attention_branch")


def choose_stations(stations: str | Sequence[str]) -> frozenset[str]:
    """The names behind a group ("trunk", "all"), a name, or a list of names and groups."""
    groups = {"trunk": TRUNK_STATIONS, "all": STATIONS + CROSS_STATIONS}
    names = [stations] if isinstance(stations, str) else list(stations)
    chosen: set[str] = set()
    for name in names:
        if name not in groups and name not in groups["all"]:
            raise ValueError(
                f"unknown station {name!r}; expected 'trunk', 'all', or names of: {', '.join(groups['all'])}"
            )
        chosen.update(groups.get(name, (name,)))
    if not chosen:
        raise ValueError("expected at least one station, got an empty list")
    return frozenset(chosen)


def stations_to_hear(reduction: Reduction) -> frozenset[str]:
    """Where taps must listen: a step needs its beginning, a branch the trunk that it is compared with."""
    heard = {"input", "output"} | reduction.stations
    if reduction.wants_branches:
        heard |= {"attention_branch", "ffn_branch", "cross_attention_branch"}
    if any(station.endswith("_branch") for station in heard):
        heard |= set(TRUNK_STATIONS) | {"after_cross_attention"}
    if reduction.wants_attention:
        heard.add("attention_input")
    return frozenset(heard)
