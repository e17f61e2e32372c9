"""Hugging Face OLMo 2 and 3: no norm before a branch, one behind it; the branches read the trunk itself."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.structure import BlockAnatomy, Family, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    shown = layouts.separate_projections(attention, attention.o_proj)
    return layouts.decoder_block(name, layer, layouts.OLMO2, attention, layer.mlp, **shown)


OLMO2 = Family("olmo2", "transformers", ("Olmo2DecoderLayer", "Olmo3DecoderLayer"), describe, causal_unless_told)
