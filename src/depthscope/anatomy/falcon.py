"""Hugging Face Falcon: parallel branches with one norm or two, or one after the other; multi-query attention."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.fused import interleaved_projections, interleaved_values
from depthscope.anatomy.structure import BlockAnatomy, Family, FusedValues, Spot, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attention
    return layouts.decoder_block(
        name,
        layer,
        _layout(layer),
        attention,
        layer.mlp,
        lambda: interleaved_projections(
            attention.query_key_value, attention.dense, attention.num_heads, attention.num_kv_heads
        ),
        context=Spot(attention.dense, "in"),
        fused_values=FusedValues(
            Spot(attention.query_key_value, "out"),
            partial(interleaved_values, heads=attention.num_heads, groups=attention.num_kv_heads),
        ),
    )


def _layout(layer: Any) -> layouts.Layout:
    if hasattr(layer, "ln_attn"):
        return layouts.Layout("parallel", "ln_attn", "ln_mlp")
    return layouts.LLAMA if hasattr(layer, "post_attention_layernorm") else layouts.ONE_NORM[0]


FALCON = Family("falcon", "transformers", ("FalconDecoderLayer",), describe, causal_unless_told)
