"""Hugging Face BERT and RoBERTa: post-norm, with the norms inside the output modules."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    branch_spots,
    cross_attention_spots,
    decoder_flag,
    linear_projections,
    post_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention, after, ffn = layer.attention.self, layer.attention.output, layer.output
    spots = post_norm_spots(layer, after.LayerNorm, ffn.LayerNorm) | branch_spots(after.dense, ffn.dense)
    cross = getattr(layer, "crossattention", None)
    if cross is not None:
        norms = after.LayerNorm, ffn.LayerNorm
        spots |= cross_attention_spots(cross.output.dense, cross.output.LayerNorm, norms, "post")
    return BlockAnatomy(
        name,
        layer,
        spots=spots,
        placement="post",
        attention=attention,
        cross_attention=None if cross is None else cross.self,
        norms=(after.LayerNorm, ffn.LayerNorm),
        causal=bool(getattr(layer, "is_decoder", False)),
        values=Spot(attention.value, "out"),
        context=Spot(after.dense, "in"),
        ffn=(
            layer.intermediate,
            ffn.dense,
        ),
        projections=lambda: linear_projections(
            attention.query, attention.key, attention.value, after.dense, attention.num_attention_heads
        ),
    )


BERT = Family(
    "bert", "transformers", ("BertLayer", "RobertaLayer", "XLMRobertaLayer", "ElectraLayer"), describe, decoder_flag
)
