"""What is not finite (NaN or infinity): sequences, from where on, and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope.anatomy.projections import has_own_operations
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
    return f"the norm after block {block}" if station == at.FINAL else f"the {station} of block {block}"


def weights_not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinity in them; of split ones, in the part that this process holds.

    The norms of all of them are asked for first: one answer, and finite only if all of them are.
    """
    with torch.no_grad():
        numbers: list[tuple[str, Tensor]] = []
        alike: dict[Any, list[Tensor]] = {}
        for name, given in named:
            plain = type(given) in (Tensor, nn.Parameter)
            weights = given if plain else _local(given)
            if _can_be_asked(weights):
                numbers.append((name, weights))
                alike.setdefault((weights.device, weights.dtype) if plain else id(weights), []).append(weights)
        # A norm may overflow where no weight is infinite: then each is asked.
        if all(math.isfinite(_norm(weights)) for weights in alike.values()):
            return []
        return [name for name, weights in numbers if not _is_finite(weights)]


def _norm(weights: list[Tensor]) -> float:
    """One number, finite only if all of these are."""
    if len(weights) == 1:
        return torch.linalg.vector_norm(weights[0]).item()
    return torch.stack(torch._foreach_norm(weights)).sum().item()


def _local(weights: Tensor) -> Tensor:
    return weights.to_local() if hasattr(weights, "to_local") else weights


def _can_be_asked(weights: Tensor) -> bool:
    return (
        not (weights.is_meta or has_own_operations(weights))
        and weights.is_floating_point()
        and weights.dtype.itemsize > 1
    )


def _is_finite(weights: Tensor) -> bool:
    """The sum is read first, which is many times faster and finite only if all of them are."""
    total = weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))
    return bool(total.isfinite()) or bool(weights.isfinite().all())
