"""Hugging Face BERT and RoBERTa: post-norm, with the norms inside the output modules."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    branch_spots,
    decoder_flag,
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
        projections=lambda: linear_projections(
            attention.query, attention.key, attention.value, after.dense, attention.num_attention_heads
        ),
    )


BERT = Family("bert", ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer"), describe, decoder_flag)
