"""Hugging Face DeepSeek-V2 and -V3: Llama's layout, keys and values from a narrow projection (latent attention)."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.fused import latent_projections, latent_values
from depthscope.anatomy.structure import BlockAnatomy, Family, FusedValues, Spot, causal_unless_told


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
        fused_values=FusedValues(
            Spot(attention.kv_b_proj, "out"),
            partial(latent_values, heads=attention.config.num_attention_heads, width=attention.v_head_dim),
        ),
    )


DEEPSEEK = Family(
    "deepseek", "transformers", ("DeepseekV2DecoderLayer", "DeepseekV3DecoderLayer"), describe, causal_unless_told
)
