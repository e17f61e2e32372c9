"""Hugging Face MPT: pre-norm, causal, one layer for all queries, keys and values, the FFN's sum inside its module,
position by alibi."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy.fused import stacked_projections, stacked_values
from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    FusedValues,
    Spot,
    branch_spots,
    causal_unless_told,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention, ffn = layer.attn, layer.ffn
    norms, heads = (layer.norm_1, layer.norm_2), attention.n_heads
    clips = bool(attention.clip_qkv)  # queries, keys and values are then no linear maps of tokens
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, *norms) | branch_spots(layer.resid_attn_dropout, ffn.down_proj),
        placement="pre",
        attention=attention,
        norms=norms,
        context=Spot(attention.out_proj, "in"),
        fused_values=None
        if clips
        else FusedValues(Spot(attention.Wqkv, "out"), partial(stacked_values, heads=heads, groups=heads)),
        ffn=(ffn.up_proj, ffn.down_proj),
        projections=None if clips else lambda: stacked_projections(attention.Wqkv, attention.out_proj, heads, heads),
    )


MPT = Family("mpt", "transformers", ("MptBlock",), describe, causal_unless_told)
