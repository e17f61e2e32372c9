"""Hugging Face GPT-2: pre-norm, causal, query, key and value fused in one Conv1D (stored transposed)."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import BlockAnatomy, Family, always, branch_spots, fused_projections, pre_norm_spots


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attn
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.ln_1, layer.ln_2) | branch_spots(attention.c_proj, layer.mlp),
        placement="pre",
        attention=attention,
        projections=lambda: fused_projections(
            attention.c_attn.weight,
            attention.c_attn.bias,
            attention.c_proj.weight,
            attention.c_proj.bias,
            attention.num_heads,
        ),
    )


GPT2 = Family("gpt2", ("GPT2Block",), describe, always(True))
