"""Hugging Face OPT: causal, pre-norm except in the 350m model; its FFN works on flattened tokens."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    always,
    branch_spots,
    linear_projections,
    post_norm_spots,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    spots = pre_norm_spots if layer.do_layer_norm_before else post_norm_spots
    return BlockAnatomy(
        name,
        layer,
        spots=spots(layer, layer.self_attn_layer_norm, layer.final_layer_norm)
        | branch_spots(attention.out_proj, layer.fc2),
        placement="pre" if layer.do_layer_norm_before else "post",
        attention=attention,
        norms=(layer.self_attn_layer_norm, layer.final_layer_norm),
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.out_proj, "in"),
        ffn=(
            layer.fc1,
            layer.fc2,
        ),
        projections=lambda: linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, attention.num_heads
        ),
    )


OPT = Family("opt", "transformers", ("OPTDecoderLayer",), describe, always(True))
