"""Where on the trunk a remedy can act, by the name that its user gives."""

from __future__ import annotations

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.remedy import Site
from depthscope.stations import trunk_is_a_sum

STATIONS = ("input", "after_attention", "ffn_input", "output")


def check_station(at: str) -> None:
    """Refuses what is no station of the trunk that can be changed."""
    if at not in STATIONS:
        raise ValueError(f"expected at one of {', '.join(STATIONS)}, got {at!r}")


def station_for(block: BlockAnatomy, at: str) -> str:
    """The station of a block that a name stands for. Where no norm stands on the trunk, `ffn_input` is a copy of it,
    normed or not; the trunk there is what the norm is given."""
    if at == "ffn_input" and trunk_is_a_sum(block.placement):
        return "after_cross_attention" if "after_cross_attention" in block.spots else "after_attention"
    return at


def shown_station(site: Site, at: str) -> str:
    """The same; a ValueError if the block does not show it."""
    station = station_for(site.block, at)
    if station not in site.block.spots:
        seen = ", ".join(s for s in STATIONS if station_for(site.block, s) in site.block.spots)
        what = f"{site.block.name!r} does not show its {at}"
        raise ValueError(f"{what}; stations that can be changed: {seen}{site.unseen}")
    return station
