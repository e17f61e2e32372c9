"""Hugging Face T5: pre-norm, an encoder and a causal decoder whose blocks also attend to the encoder."""

from __future__ import annotations

from typing import Any

from depthscope import walking
from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    cross_attention_spots,
    linear_projections,
    pre_norm_spots,
)

BLOCKS = ("T5Block", "MT5Block", "UMT5Block")


def describe(name: str, block: Any) -> BlockAnatomy:
    first, last = block.layer[0], block.layer[-1]
    attention = first.SelfAttention
    spots = pre_norm_spots(block, first.layer_norm, last.layer_norm)
    spots |= {"attention_branch": Spot(attention, "out"), "ffn_branch": Spot(last.DenseReluDense, "out")}
    cross_attention = None
    if block.is_decoder:
        cross = block.layer[1]
        cross_attention = cross.EncDecAttention
        norms = first.layer_norm, last.layer_norm
        spots |= cross_attention_spots(cross_attention, cross.layer_norm, norms, "pre")
    return BlockAnatomy(
        name,
        block,
        spots=spots,
        placement="pre",
        attention=attention,
        norms=(first.layer_norm, last.layer_norm),
        values=Spot(attention.v, "out"),
        context=Spot(attention.o, "in"),
        ffn=(last.DenseReluDense,),
        cross_attention=cross_attention,
        projections=lambda: linear_projections(attention.q, attention.k, attention.v, attention.o, attention.n_heads),
        part="decoder" if block.is_decoder else "encoder",
        causal=bool(block.is_decoder),
    )


def causal(model: Any) -> bool | None:
    """The encoder is not; a model with a decoder has both kinds, and the block's `part` tells them apart."""
    parts = {bool(module.is_decoder) for module in walking.modules(model) if type(module).__name__ in BLOCKS}
    return parts.pop() if len(parts) == 1 else None


T5 = Family("t5", "transformers", BLOCKS, describe, causal)
