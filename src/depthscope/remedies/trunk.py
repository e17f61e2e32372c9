"""Where on the trunk a remedy can act, by the name that its user gives."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from depthscope.anatomy import BlockAnatomy
from depthscope.remedies.remedy import Site
from depthscope.remedies.uniform import RealTokensHook, RelativeToMean
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


@dataclass(frozen=True)
class TrunkRemedy(RelativeToMean):
    """Base of those that change the tokens at one station of the trunk, and are relative to a mean."""

    at: str = field(default="output", kw_only=True)

    always_shown: ClassVar[tuple[str, ...]] = ("at",)

    def __post_init__(self) -> None:
        check_station(self.at)
        super().__post_init__()

    def stations_in(self, block: BlockAnatomy) -> tuple[str, ...]:
        """The station that it changes."""
        return (station_for(block, self.at),)

    def install(self, site: Site) -> None:
        """Puts its hook into one block, or refuses."""
        station = shown_station(site, self.at)
        site.put(self, self.hook(site, station), station)

    @abstractmethod
    def hook(self, site: Site, station: str) -> RealTokensHook:
        """What changes the tokens at this station of this block."""
