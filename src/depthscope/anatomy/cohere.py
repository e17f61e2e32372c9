"""Hugging Face Cohere and Phi: parallel branches that read one norm."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.structure import BlockAnatomy, Family, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    output = attention.dense if hasattr(attention, "dense") else attention.o_proj
    shown = layouts.separate_projections(attention, output)
    return layouts.decoder_block(name, layer, layouts.ONE_NORM[0], attention, layer.mlp, **shown)


COHERE = Family(
    "cohere",
    "transformers",
    ("CohereDecoderLayer", "Cohere2DecoderLayer", "PhiDecoderLayer"),
    describe,
    causal_unless_told,
)
