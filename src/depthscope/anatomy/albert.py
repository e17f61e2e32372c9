"""Hugging Face ALBERT: post-norm, one module applied once per block."""

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
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attention
    return BlockAnatomy(
        name,
        layer,
        spots=post_norm_spots(layer, attention.LayerNorm, layer.full_layer_layer_norm)
        | branch_spots(attention.dense, layer.ffn_output),
        placement="post",
        attention=attention,
        norms=(attention.LayerNorm, layer.full_layer_layer_norm),
        values=Spot(attention.value, "out"),
        context=Spot(attention.dense, "in"),
        ffn=(
            layer.ffn,
            layer.ffn_output,
        ),
        projections=lambda: linear_projections(
            attention.query, attention.key, attention.value, attention.dense, attention.num_attention_heads
        ),
    )


ALBERT = Family("albert", "transformers", ("AlbertLayer",), describe, always(False))
