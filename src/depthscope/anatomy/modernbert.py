"""Hugging Face ModernBERT: pre-norm, query, key and value in one matrix; no norm before the first block's attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy.fused import stacked_values
from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    FusedValues,
    Spot,
    always,
    branch_spots,
    fused_projections,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attn
    heads = attention.config.num_attention_heads
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.attn_norm, layer.mlp_norm) | branch_spots(attention.out_drop, layer.mlp),
        placement="pre",
        attention=attention,
        norms=(layer.attn_norm, layer.mlp_norm),
        context=Spot(attention.Wo, "in"),
        fused_values=FusedValues(Spot(attention.Wqkv, "out"), partial(stacked_values, heads=heads, groups=heads)),
        ffn=(layer.mlp,),
        projections=lambda: fused_projections(
            attention.Wqkv.weight, attention.Wqkv.bias, attention.Wo.weight, attention.Wo.bias, heads, linear=True
        ),
    )


MODERNBERT = Family("modernbert", "transformers", ("ModernBertEncoderLayer",), describe, always(False))
