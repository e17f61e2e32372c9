"""Hugging Face DeBERTa-v2 and -v3: post-norm like BERT, attention by content and by relative position.

The projections are those of the content. Scores have terms of positions too, so that queries and keys alone do not
give P; values and output do give the branch from it.
"""

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
    attention, after, ffn = layer.attention.self, layer.attention.output, layer.output
    return BlockAnatomy(
        name,
        layer,
        spots=post_norm_spots(layer, after.LayerNorm, ffn.LayerNorm) | branch_spots(after.dense, ffn.dense),
        placement="post",
        attention=attention,
        norms=(after.LayerNorm, ffn.LayerNorm),
        values=Spot(attention.value_proj, "out"),
        context=Spot(after.dense, "in"),
        ffn=(layer.intermediate, ffn.dense),
        projections=lambda: linear_projections(
            attention.query_proj, attention.key_proj, attention.value_proj, after.dense, attention.num_attention_heads
        ),
    )


DEBERTA = Family("deberta", "transformers", ("DebertaV2Layer",), describe, always(False))
