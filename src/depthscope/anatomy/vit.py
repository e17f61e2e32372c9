"""Hugging Face ViT and DeiT: pre-norm, bidirectional, no padding."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    always,
    branch_spots,
    linear_projections,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attention
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.layernorm_before, layer.layernorm_after)
        | branch_spots(attention.o_proj, layer.mlp),
        placement="pre",
        attention=attention,
        norms=(layer.layernorm_before, layer.layernorm_after),
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.o_proj, "in"),
        ffn=(layer.mlp,),
        projections=lambda: linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, attention.num_attention_heads
        ),
    )


VIT = Family("vit", "transformers", ("ViTLayer", "DeiTLayer"), describe, always(False), mask_argument=None)
