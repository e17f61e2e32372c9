"""Hugging Face Gemma 2 and 3: a norm before each branch and another behind it; what is added has been normed."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.structure import BlockAnatomy, Family, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    shown = layouts.separate_projections(attention, attention.o_proj)
    return layouts.decoder_block(name, layer, layouts.GEMMA2, attention, layer.mlp, **shown)


GEMMA2 = Family("gemma2", "transformers", ("Gemma2DecoderLayer", "Gemma3DecoderLayer"), describe, causal_unless_told)
