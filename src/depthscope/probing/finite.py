"""What is not finite (NaN or infinity): sequences, from where on, and weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from depthscope import stations as at
from depthscope import walking
from depthscope.anatomy import Anatomy
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


def modules_of_attention(_model: nn.Module, anatomy: Anatomy) -> list[nn.Module]:
    """Those of every block's attention; of a block that does not show it, all."""
    return [module for block in anatomy.blocks for module in walking.modules(block.attention or block.module)]


def weights_not_finite_in(model: nn.Module, attention: list[nn.Module], *, any_seen: bool) -> list[str]:
    """Of all weights, where an output shows it. Else those of attention: some kernels turn its NaN into zeros."""
    if any_seen:
        return weights_not_finite(walking.named_parameters(model))
    inside = walking.weights_in(attention)
    if are_finite(inside):
        return []
    ids = set(map(id, inside))
    return weights_not_finite(
        (name, weights) for name, weights in walking.named_parameters(model) if id(weights) in ids
    )


def weights_not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Names of the weights with NaN or infinity in them; of split ones, in the part that this process holds."""
    listed = list(named)
    if are_finite([weights for _, weights in listed]):
        return []
    with torch.no_grad():
        return [name for name, weights in listed if _can_be_asked(part := _local(weights)) and not _is_finite(part)]


def are_finite(weights: Iterable[Tensor]) -> bool:
    """Whether the norms of all of these are: one answer. False too where a norm overflows and no weight is infinite."""
    alike: dict[Any, list[Tensor]] = {}
    for given in weights:
        plain = type(given) in (Tensor, nn.Parameter)
        part = given if plain else _local(given)
        alike.setdefault((part.device, part.dtype) if plain else id(part), []).append(part)
    with torch.no_grad():
        return all(math.isfinite(_norm(group)) for group in alike.values() if _can_be_asked(group[0]))


def _norm(weights: list[Tensor]) -> float:
    """One number, finite only if all of these are."""
    if len(weights) == 1:
        return torch.linalg.vector_norm(weights[0]).item()
    return torch.stack(torch._foreach_norm(weights)).sum().item()


def _local(weights: Tensor) -> Tensor:
    return weights.to_local() if hasattr(weights, "to_local") else weights


def _can_be_asked(weights: Tensor) -> bool:
    return not weights.is_meta and weights.is_floating_point() and weights.dtype.itemsize > 1


def _is_finite(weights: Tensor) -> bool:
    """The sum is read first, which is many times faster and finite only if all of them are."""
    total = weights.sum(dtype=torch.promote_types(weights.dtype, torch.float32))
    return bool(total.isfinite()) or bool(weights.isfinite().all())
