"""Hugging Face GPT-2: pre-norm, causal, query, key and value fused in one Conv1D (stored transposed)."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy.fused import stacked_values
from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    FusedValues,
    Spot,
    always,
    branch_spots,
    cross_attention_spots,
    fused_projections,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attn
    spots = pre_norm_spots(layer, layer.ln_1, layer.ln_2) | branch_spots(attention.c_proj, layer.mlp)
    cross = getattr(layer, "crossattention", None)
    if cross is not None:
        spots |= cross_attention_spots(cross.c_proj, layer.ln_cross_attn, (layer.ln_1, layer.ln_2), "pre")
    return BlockAnatomy(
        name,
        layer,
        spots=spots,
        placement="pre",
        attention=attention,
        cross_attention=cross,
        norms=(layer.ln_1, layer.ln_2),
        context=Spot(attention.c_proj, "in"),
        fused_values=FusedValues(
            Spot(attention.c_attn, "out"),
            partial(stacked_values, heads=attention.num_heads, groups=attention.num_heads),
        ),
        ffn=(layer.mlp,),
        projections=lambda: fused_projections(
            attention.c_attn.weight,
            attention.c_attn.bias,
            attention.c_proj.weight,
            attention.c_proj.bias,
            attention.num_heads,
        ),
    )


GPT2 = Family("gpt2", "transformers", ("GPT2Block",), describe, always(True))
