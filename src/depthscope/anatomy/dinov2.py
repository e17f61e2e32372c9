"""Hugging Face DINOv2, with registers or without: pre-norm, and each branch times a vector (LayerScale)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Projections,
    Spot,
    always,
    branch_spots,
    linear_projections,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attention

    def projections() -> Projections:
        plain = linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, attention.num_attention_heads
        )
        scale = layer.layer_scale1.lambda1.detach()  # (d)
        assert plain.output is not None
        bias = None if plain.output_bias is None else plain.output_bias * scale
        return replace(plain, output=plain.output * scale, output_bias=bias)

    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.norm1, layer.norm2) | branch_spots(layer.layer_scale1, layer.layer_scale2),
        placement="pre",
        attention=attention,
        norms=(layer.norm1, layer.norm2),
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.o_proj, "in"),
        ffn=(layer.mlp, layer.layer_scale2),
        projections=projections,
    )


DINOV2 = Family(
    "dinov2",
    "transformers",
    ("Dinov2Layer", "Dinov2WithRegistersLayer"),
    describe,
    always(False),
    mask_argument=None,
)
