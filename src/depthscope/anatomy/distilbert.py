"""Hugging Face DistilBERT: post-norm, the norms beside the sub-layers."""

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
        spots=post_norm_spots(layer, layer.sa_layer_norm, layer.output_layer_norm)
        | branch_spots(attention.out_lin, layer.ffn),
        placement="post",
        attention=attention,
        norms=(layer.sa_layer_norm, layer.output_layer_norm),
        values=Spot(attention.v_lin, "out"),
        context=Spot(attention.out_lin, "in"),
        ffn=(layer.ffn,),
        projections=lambda: linear_projections(
            attention.q_lin, attention.k_lin, attention.v_lin, attention.out_lin, attention.n_heads
        ),
    )


DISTILBERT = Family("distilbert", "transformers", ("TransformerBlock",), describe, always(False))
