"""Our Transformer-XL: every station is a module of its own; the tokens are the segment's, the memory's are not.

The instrument reads this file before it looks at its first model, whatever that is: the model's own is imported when
one of its blocks is there.
"""

from __future__ import annotations

from torch import nn

from depthscope import walking
from depthscope.anatomy import BlockAnatomy, Family, Spot
from depthscope.anatomy.ours import norms_of, projections_of


def describe(name: str, block: nn.Module) -> BlockAnatomy:
    from depthscope_lab.models.transformer_xl import TransformerXLBlock

    assert isinstance(block, TransformerXLBlock)
    attention = block.attention
    return BlockAnatomy(
        name,
        block,
        # The output is taken behind any hook on the block itself.
        spots={station: Spot(module, "out") for station, module in block.stations.items()}
        | {"output": Spot(block, "out")},
        placement=block.placement,
        attention=attention,
        norms=norms_of(block),
        values=Spot(attention.value, "out"),
        context=Spot(attention.output, "in"),
        ffn=(block.ffn,),
        projections=projections_of(attention),
    )


def causal(model: nn.Module) -> bool:
    """Unless the paper's mean over the segment lets tokens see later ones."""
    from depthscope_lab.models.transformer_xl import TransformerXLBlock

    blocks = [module for module in walking.modules(model) if isinstance(module, TransformerXLBlock)]
    return not any(block.carried_mean is not None and block.carried_mean.leaks for block in blocks)


TRANSFORMER_XL = Family(
    "transformer-xl", "depthscope_lab", ("TransformerXLBlock",), describe, causal, mask_argument=None
)
