"""Our Transformer-XL: every station is a module of its own; the tokens are the segment's, the memory's are not.

The instrument reads this file before it looks at its first model, whatever that is: the model's own is imported when
one of its blocks is there.
"""

from __future__ import annotations

from torch import nn

from depthscope import walking
from depthscope.anatomy import Family
from depthscope.anatomy.odd_families import ours


def causal(model: nn.Module) -> bool:
    """Unless the paper's mean over the segment lets tokens see later ones."""
    from depthscope_lab.models.transformer_xl import TransformerXLBlock

    blocks = [module for module in walking.modules(model) if isinstance(module, TransformerXLBlock)]
    return not any(block.carried_mean is not None and block.carried_mean.leaks for block in blocks)


TRANSFORMER_XL = Family("transformer-xl", "depthscope_lab", ("TransformerXLBlock",), ours, causal, mask_argument=None)
