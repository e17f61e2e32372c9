"""Hugging Face Phi-3: pre-norm, causal, one layer for all queries, then all keys, then all values."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.fused import stacked_projections, stacked_values
from depthscope.anatomy.structure import BlockAnatomy, Family, FusedValues, Spot, branch_spots, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention, config = layer.self_attn, layer.self_attn.config
    block = layouts.decoder_block(
        name,
        layer,
        layouts.LLAMA,
        attention,
        layer.mlp,
        lambda: stacked_projections(
            attention.qkv_proj, attention.o_proj, config.num_attention_heads, config.num_key_value_heads
        ),
        context=Spot(attention.o_proj, "in"),
        fused_values=FusedValues(
            Spot(attention.qkv_proj, "out"),
            partial(stacked_values, heads=config.num_attention_heads, groups=config.num_key_value_heads),
        ),
    )
    return replace(block, spots={**block.spots, **branch_spots(layer.resid_attn_dropout, layer.resid_mlp_dropout)})


PHI3 = Family("phi3", "transformers", ("Phi3DecoderLayer",), describe, causal_unless_told)
