"""Hugging Face Bloom: pre-norm, causal, the sums inside the modules of the branches, position by alibi."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy.fused import interleaved_projections, interleaved_values
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
    attention, ffn = layer.self_attention, layer.mlp
    norms = layer.input_layernorm, layer.post_attention_layernorm
    if layer.apply_residual_connection_post_layernorm or (attention.pretraining_tp > 1 and attention.slow_but_exact):
        # The trunk is then what a norm gives, or the last layers are never called: what is certain is left.
        return BlockAnatomy(name, layer, {"input": Spot(layer, "in"), "output": Spot(layer, "out")}, norms=norms)
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, *norms) | branch_spots(attention.dense, ffn.dense_4h_to_h),
        placement="pre",
        attention=attention,
        norms=norms,
        context=Spot(attention.dense, "in"),
        fused_values=FusedValues(
            Spot(attention.query_key_value, "out"),
            partial(interleaved_values, heads=attention.num_heads, groups=attention.num_heads),
        ),
        ffn=(ffn.dense_h_to_4h, ffn.dense_4h_to_h),
        projections=lambda: interleaved_projections(
            attention.query_key_value, attention.dense, attention.num_heads, attention.num_heads
        ),
    )


BLOOM = Family("bloom", "transformers", ("BloomBlock",), describe, causal_unless_told)
