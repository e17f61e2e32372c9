"""Hugging Face MPNet: post-norm like BERT, with a relative position bias and eager attention."""

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
    attention, ffn = layer.attention.attn, layer.output
    return BlockAnatomy(
        name,
        layer,
        spots=post_norm_spots(layer, layer.attention.LayerNorm, ffn.LayerNorm) | branch_spots(attention.o, ffn.dense),
        placement="post",
        attention=attention,
        norms=(layer.attention.LayerNorm, ffn.LayerNorm),
        values=Spot(attention.v, "out"),
        context=Spot(attention.o, "in"),
        ffn=(
            layer.intermediate,
            ffn.dense,
        ),
        projections=lambda: linear_projections(
            attention.q, attention.k, attention.v, attention.o, attention.num_attention_heads
        ),
    )


MPNET = Family("mpnet", "transformers", ("MPNetLayer",), describe, always(False))
