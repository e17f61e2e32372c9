"""What a model is made of: its blocks, stations, projections, token axis, mask, causality. One file per family,
and families of other packages (`register_family`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from torch import nn

from depthscope.anatomy.albert import ALBERT
from depthscope.anatomy.bert import BERT
from depthscope.anatomy.bloom import BLOOM
from depthscope.anatomy.cohere import COHERE
from depthscope.anatomy.deepseek import DEEPSEEK
from depthscope.anatomy.distilbert import DISTILBERT
from depthscope.anatomy.falcon import FALCON
from depthscope.anatomy.gemma2 import GEMMA2
from depthscope.anatomy.gpt2 import GPT2
from depthscope.anatomy.gpt_neox import GPT_NEOX
from depthscope.anatomy.gptj import GPTJ
from depthscope.anatomy.jamba import JAMBA
from depthscope.anatomy.llama import LLAMA
from depthscope.anatomy.mamba import MAMBA
from depthscope.anatomy.mpnet import MPNET
from depthscope.anatomy.olmo2 import OLMO2
from depthscope.anatomy.opt import OPT
from depthscope.anatomy.ours import OURS
from depthscope.anatomy.phi3 import PHI3
from depthscope.anatomy.structure import Addition, Anatomy, BlockAnatomy, Family, Projections, Side, Spot, check_family
from depthscope.anatomy.t5 import T5
from depthscope.anatomy.torch_encoder import TORCH_ENCODER
from depthscope.anatomy.transformer_xl import TRANSFORMER_XL
from depthscope.anatomy.unknown import named_blocks, repeated_blocks
from depthscope.anatomy.vit import VIT
from depthscope.anatomy.xlnet import XLNET
from depthscope.registry import Registry

FAMILIES: Registry[Family] = Registry(
    "family",
    "depthscope.families",
    (
        OURS,
        TRANSFORMER_XL,
        TORCH_ENCODER,
        *(BERT, ALBERT, XLNET, DISTILBERT, MPNET, VIT, T5),
        *(GPT2, OPT, BLOOM, GPTJ, GPT_NEOX, FALCON),
        *(LLAMA, PHI3, GEMMA2, OLMO2, COHERE, DEEPSEEK),
        *(MAMBA, JAMBA),
    ),
    check=check_family,
)

__all__ = [
    "FAMILIES",
    "Addition",
    "Anatomy",
    "BlockAnatomy",
    "Family",
    "Projections",
    "Side",
    "Spot",
    "anatomy_of",
    "register_family",
]


def register_family(family: Family) -> Family:
    """Adds a family of models, so that `probe`, `apply` and the rest know its blocks; returns it.

    An installed package does the same with an entry point in the group `depthscope.families`.
    """
    return FAMILIES.register(family, owner=getattr(family, "library", None))


def anatomy_of(model: nn.Module, blocks: str | None = None) -> Anatomy:
    """The anatomy of a model. `blocks`, a glob of module names, overrides what is found."""
    named = None
    if blocks is not None:
        anatomy = named_blocks(model, blocks)
        named = {id(block.module) for block in anatomy.blocks}
        families = {_family_of(type(block.module)) for block in anatomy.blocks}  # type: ignore[arg-type]
        if len(families) != 1 or None in families:
            return anatomy
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        if named is not None and id(module) not in named:
            continue
        if (family := _family_of(type(module))) is not None:  # type: ignore[arg-type]
            found.setdefault(family.name, []).append((name, module))
    if not found:
        return repeated_blocks(model)
    sizes = {name: sum(p.numel() for _, block in blocks for p in block.parameters()) for name, blocks in found.items()}
    family = FAMILIES[max(sizes, key=sizes.__getitem__)]
    own = found.pop(family.name)
    described = _in_parts(tuple(family.describe(name, module) for name, module in own))
    told = {block.causal for block in described}  # the blocks themselves know more than what stands around them
    return Anatomy(
        family.name,
        described,
        token_axis=family.token_axis_of(own[0][1]) if family.token_axis_of else family.token_axis,
        mask_argument=family.mask_argument,
        causal_by_call=family.causal_by_call,
        causal=family.causal(model) if told == {None} else told.pop() if len(told) == 1 else None,
        notes=(
            *family.notes,
            *(f"{len(others)} blocks of the family {name} are not measured" for name, others in found.items()),
            *_decoder_note(model),
        ),
    )


def _in_parts(blocks: tuple[BlockAnatomy, ...]) -> tuple[BlockAnatomy, ...]:
    """Blocks of which some are causal and some are not are an encoder and a decoder, as in `EncoderDecoderModel`."""
    if len({block.causal for block in blocks}) == 1 or any(block.part for block in blocks):
        return blocks
    return tuple(replace(block, part="decoder" if block.causal else "encoder") for block in blocks)


def _decoder_note(model: nn.Module) -> tuple[str, ...]:
    decoders = sum(isinstance(module, nn.TransformerDecoderLayer) for module in model.modules())
    return (f"{decoders} blocks of nn.TransformerDecoder are not known, and not measured",) if decoders else ()


def _family_of(kind: Any) -> Family | None:
    len(FAMILIES)  # families of other packages are found before the first question is answered
    return _looked_up(kind, FAMILIES.version)


@cache
def _looked_up(kind: Any, _version: int) -> Family | None:
    """The family whose block a class is: by name, since transformers may be absent, and only of its library."""

    for parent in kind.__mro__:
        for family in FAMILIES.values():
            if parent.__name__ in family.block_classes and parent.__module__.split(".")[0] == family.library:
                return family
    return None
