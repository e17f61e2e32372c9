"""Hugging Face GPT-NeoX (Pythia): parallel branches, each with a norm of its own, or one after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.fused import interleaved_projections, interleaved_values
from depthscope.anatomy.structure import BlockAnatomy, Family, FusedValues, Spot, branch_spots, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attention
    heads = attention.config.num_attention_heads
    block = layouts.decoder_block(
        name,
        layer,
        replace(layouts.LLAMA, placement="parallel") if layer.use_parallel_residual else layouts.LLAMA,
        attention,
        layer.mlp,
        lambda: interleaved_projections(attention.query_key_value, attention.dense, heads, heads),
        context=Spot(attention.dense, "in"),
        fused_values=FusedValues(
            Spot(attention.query_key_value, "out"), partial(interleaved_values, heads=heads, groups=heads)
        ),
    )
    return replace(block, spots={**block.spots, **branch_spots(layer.post_attention_dropout, layer.post_mlp_dropout)})


GPT_NEOX = Family("gpt-neox", "transformers", ("GPTNeoXLayer",), describe, causal_unless_told)
