"""Our own `Block`: every station is a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from depthscope import walking
from depthscope.anatomy.projections import linear_projections
from depthscope.anatomy.structure import BlockAnatomy, Projections, Spot
from depthscope.models.block import Block


def describe(name: str, block: Any) -> BlockAnatomy:
    attention = block.attention
    norms = (getattr(block, norm) for norm in block.wiring.norms)  # those that the wiring calls, in their order
    return BlockAnatomy(
        name,
        block,
        # The output is taken behind any hook on the block itself.
        spots={station: Spot(module, "out") for station, module in block.stations.items()}
        | {"output": Spot(block, "out")},
        placement=block.wiring.placement,
        attention=attention,
        norms=tuple(norm for norm in norms if norm is not None),
        values=Spot(attention.value, "out"),
        context=Spot(attention.output, "in"),
        ffn=(block.ffn,),
        projections=_projections_of(attention),
    )


def _projections_of(attention: Any) -> Callable[[], Projections] | None:
    """Its matrices; None where a norm follows them: its values are then no linear map of what attention reads."""
    if isinstance(attention.value, nn.Linear) and type(attention.value).forward is not nn.Linear.forward:
        return None
    output = attention.output if isinstance(attention.output, nn.Linear) else None
    return lambda: linear_projections(attention.query, attention.key, attention.value, output, attention.heads)


def causal(model: nn.Module) -> bool:
    """As attention says."""
    return any(module.attention.causal for module in walking.modules(model) if isinstance(module, Block))
