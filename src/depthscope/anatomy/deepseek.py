"""Hugging Face DeepSeek-V2 and -V3: Llama's layout, keys and values from a narrow projection (latent attention)."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.fused import latent_projections
from depthscope.anatomy.structure import BlockAnatomy, Family, Spot, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    return layouts.decoder_block(
        name,
        layer,
        layouts.LLAMA,
        attention,
        layer.mlp,
        lambda: latent_projections(attention),
        context=Spot(attention.o_proj, "in"),
    )


DEEPSEEK = Family(
    "deepseek", "transformers", ("DeepseekV2DecoderLayer", "DeepseekV3DecoderLayer"), describe, causal_unless_told
)
