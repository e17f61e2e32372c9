"""What a model is made of: its blocks, stations, projections, token axis, mask, causality. One file per family."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

from depthscope.anatomy.albert import ALBERT
from depthscope.anatomy.bert import BERT
from depthscope.anatomy.distilbert import DISTILBERT
from depthscope.anatomy.gpt2 import GPT2
from depthscope.anatomy.llama import LLAMA
from depthscope.anatomy.mpnet import MPNET
from depthscope.anatomy.opt import OPT
from depthscope.anatomy.ours import OURS
from depthscope.anatomy.structure import Anatomy, BlockAnatomy, Family, Projections, Spot
from depthscope.anatomy.t5 import T5
from depthscope.anatomy.torch_encoder import TORCH_ENCODER
from depthscope.anatomy.unknown import named_blocks, repeated_blocks
from depthscope.anatomy.vit import VIT
from depthscope.anatomy.xlnet import XLNET

FAMILIES = (OURS, TORCH_ENCODER, BERT, ALBERT, XLNET, DISTILBERT, MPNET, VIT, GPT2, OPT, LLAMA, T5)

__all__ = ["FAMILIES", "Anatomy", "BlockAnatomy", "Family", "Projections", "Spot", "anatomy_of"]


def anatomy_of(model: nn.Module, blocks: str | None = None) -> Anatomy:
    """The anatomy of a model. `blocks`, a glob of module names, overrides what is found."""
    if blocks is not None:
        return named_blocks(model, blocks)
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if (family := _family_of(type(module))) is not None:  # type: ignore[arg-type]
            found.setdefault(family.name, []).append((name, module))
    for family in FAMILIES:
        if blocks_found := found.get(family.name):
            return Anatomy(
                family.name,
                tuple(family.describe(name, module) for name, module in blocks_found),
                token_axis=family.token_axis_of(blocks_found[0][1]) if family.token_axis_of else family.token_axis,
                mask_argument=family.mask_argument,
                mask_marks_padding=family.mask_marks_padding,
                causal=family.causal(model),
            )
    return repeated_blocks(model)


@cache
def _family_of(kind: Any) -> Family | None:
    """The family whose block a class is: by name, since transformers may be absent, and only of a library we
    know, since names are not unique."""

    for parent in kind.__mro__:
        if parent.__module__.split(".")[0] in ("depthscope", "torch", "transformers"):
            for family in FAMILIES:
                if parent.__name__ in family.block_classes:
                    return family
    return None
