"""Our own `Block`: every station is a module of its own."""

from __future__ import annotations

from torch import nn

from depthscope import walking
from depthscope.anatomy.structure import BlockAnatomy, Family, Spot, linear_projections
from depthscope.models.block import Block


def describe(name: str, block: nn.Module) -> BlockAnatomy:
    assert isinstance(block, Block)
    attention = block.attention
    output = attention.output if isinstance(attention.output, nn.Linear) else None
    return BlockAnatomy(
        name,
        block,
        # The output is taken behind any hook on the block itself.
        spots={station: Spot(module, "out") for station, module in block.stations.items()}
        | {"output": Spot(block, "out")},
        placement=block.wiring.placement,
        attention=attention,
        norms=(block.norm1, block.norm2),
        values=Spot(attention.value, "out"),
        context=Spot(attention.output, "in"),
        ffn=(block.ffn,),
        projections=lambda: linear_projections(
            attention.query, attention.key, attention.value, output, attention.heads
        ),
    )


def causal(model: nn.Module) -> bool:
    return any(module.attention.causal for module in walking.modules(model) if isinstance(module, Block))


OURS = Family("depthscope", "depthscope", ("Block",), describe, causal, mask_argument="mask")
