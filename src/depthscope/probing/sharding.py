"""Models that are split among processes by tensor parallelism: each process has some of the heads, and all tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthscope.probing.readings import Reading

_SAME = 1e-3  # of the tokens' norm: bfloat16 keeps 4e-3 of a number, and its errors cancel in a sum of thousands


class Place(NamedTuple):
    """Where attention was seen."""

    block: int
    kind: str  # "attention" or "cross_attention"


def processes_of(module: nn.Module) -> Any:
    """The group of processes among which the weights of a module are split while it runs; None: they are whole.

    Tensor parallelism keeps weights as DTensors during a pass. `fully_shard` puts whole weights in their place for as
    long as a module runs, so that every process has all the heads.
    """
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is None or not torch.distributed.is_initialized():  # then there is no DTensor, or no other process
        return None
    for parameter in _weights(module):
        if isinstance(parameter, tensors.DTensor):
            for dimension, placement in enumerate(parameter.placements):
                if placement.is_shard() and parameter.device_mesh.size(dimension) > 1:
                    return parameter.device_mesh.get_group(dimension)
    return None


def _weights(module: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of a running module, but for those that `fully_shard` brings for a part of it only."""
    yield from module.parameters(recurse=False)
    sharding = sys.modules.get("torch.distributed.fsdp")
    for child in module.children():
        if sharding is None or not isinstance(child, sharding.FSDPModule):
            yield from _weights(child)


def require_whole(block: nn.Module, tokens: Tensor) -> None:
    """Refuses tokens that are split too (sequence parallelism): every process would measure other ones.

    Beside their shape, two numbers say so that other tokens of the same size would not have: products with fixed
    vectors without a pattern.
    """
    group = processes_of(block)
    if group is None:
        return
    flat = tokens.double().flatten()
    places = torch.arange(len(flat), dtype=torch.float64, device=flat.device)
    norm, *shadows = (value.item() for value in (flat.norm(), flat @ torch.cos(places), flat @ torch.sin(places)))
    for shape, *others in _from_all((tuple(tokens.shape), *shadows), group):
        if shape != tokens.shape or any(abs(a - b) > _SAME * norm for a, b in zip(shadows, others, strict=True)):
            raise ValueError(
                "the processes of tensor parallelism have different tokens, as with different inputs or under sequence "
                "parallelism: give every process the same inputs, and let the plan keep the tokens whole"
            )


def gather_heads(rows: list[Reading], groups: dict[Place, Any]) -> list[Reading]:
    """The rows of all heads, in every process, numbered through in the order of the processes.

    `groups` has the places where heads are split. Weights are split in the order of the heads, so that the first
    process has the first of them; the rows of all heads stand where the first of them stood.
    """
    for group in {id(group): group for group in groups.values()}.values():
        own: dict[tuple[int, Place], list[Reading]] = {}
        for row in rows:
            if row.head >= 0 and groups.get(place := Place(row.block, row.station)) is group:
                own.setdefault((row.first_sample, place), []).append(row)
        everyone, gathered = _from_all(own, group), []
        for row in rows:
            mine = own.get((row.first_sample, Place(row.block, row.station)), ()) if row.head >= 0 else ()
            if not mine:
                gathered.append(row)
            elif row is mine[0]:
                first = 0
                for theirs in everyone:
                    part = theirs[row.first_sample, Place(row.block, row.station)]
                    gathered += [other._replace(head=first + other.head) for other in part]
                    first += max(other.head for other in part) + 1
        rows = gathered
    return rows


def _from_all(own: Any, group: Any) -> list[Any]:
    """What every process of the group has."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(everyone, own, group=group)
    return everyone
