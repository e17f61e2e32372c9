"""Which sequences are not finite (NaN or infinity), and from where on: they have no part in any mean from there on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from depthscope import stations as at
from depthscope.naming import counted, sequences_of

Place = tuple[int, str]  # block, station; (0, "output") is what enters block 1


def as_records(since: Mapping[int, Place]) -> list[dict[str, Any]]:
    """For a profile's metadata."""
    return [{"sample": sample, "block": block, "station": name} for sample, (block, name) in sorted(since.items())]


def in_words(since: Mapping[int, Place]) -> str:
    """Sequence 0 from what enters block 1 on, sequences 2–3 from the output of block 4 on."""
    places: dict[Place, list[int]] = {}
    for sample, place in sorted(since.items()):
        places.setdefault(place, []).append(sample)
    return ", ".join(f"{sequences_of(places[place])} from {_place(*place)} on" for place in sorted(places))


def note(since: Mapping[int, Place], samples: int) -> list[str]:
    """Nothing where all are finite."""
    if not since:
        return []
    who = f"{len(since)} of {counted(samples, 'sequence')} {'has' if len(since) == 1 else 'have'}"
    return [
        f"{who} numbers that are not finite (NaN or infinity), and no part in any mean from there on: {in_words(since)}"
    ]


def _place(block: int, station: str) -> str:
    if block == 0 or station == "input":
        return f"what enters block {max(block, 1)}"
    return f"the norm behind block {block}" if station == at.FINAL else f"the {station} of block {block}"
