"""Our own `Block`: every station is a module of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from depthscope import walking
from depthscope.anatomy.structure import BlockAnatomy, Family, Projections, Spot, linear_projections
from depthscope.models.block import Block


def describe(name: str, block: nn.Module) -> BlockAnatomy:
    assert isinstance(block, Block)
    attention = block.attention
    return BlockAnatomy(
        name,
        block,
        # The output is taken behind any hook on the block itself.
        spots={station: Spot(module, "out") for station, module in block.stations.items()}
        | {"output": Spot(block, "out")},
        placement=block.wiring.placement,
        attention=attention,
        norms=norms_of(block),
        values=Spot(attention.value, "out"),
        context=Spot(attention.output, "in"),
        ffn=(block.ffn,),
        projections=projections_of(attention),
    )


def norms_of(block: Any) -> tuple[nn.Module, ...]:
    """The norms that the wiring of a block calls, in their order."""
    found = (getattr(block, name) for name in block.wiring.norms)
    return tuple(norm for norm in found if norm is not None)


def projections_of(attention: Any) -> Callable[[], Projections] | None:
    """Its matrices; None where a norm follows them: its values are then no linear map of what attention reads."""
    if isinstance(attention.value, nn.Linear) and type(attention.value).forward is not nn.Linear.forward:
        return None
    output = attention.output if isinstance(attention.output, nn.Linear) else None
    return lambda: linear_projections(attention.query, attention.key, attention.value, output, attention.heads)


def causal(model: nn.Module) -> bool:
    return any(module.attention.causal for module in walking.modules(model) if isinstance(module, Block))


OURS = Family("depthscope", "depthscope", ("Block",), describe, causal, mask_argument="mask")
