"""Hugging Face Llama, Qwen2, Mistral, Gemma: pre-norm, causal, grouped-query attention."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    always,
    branch_spots,
    linear_projections,
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention, config = layer.self_attn, layer.self_attn.config
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.input_layernorm, layer.post_attention_layernorm)
        | branch_spots(attention.o_proj, layer.mlp),
        placement="pre",
        attention=attention,
        norms=(layer.input_layernorm, layer.post_attention_layernorm),
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.o_proj, "in"),
        ffn=(layer.mlp,),
        projections=lambda: linear_projections(
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            config.num_attention_heads,
            config.num_key_value_heads,
        ),
    )


LLAMA = Family(
    "llama",
    "transformers",
    ("LlamaDecoderLayer", "Qwen2DecoderLayer", "MistralDecoderLayer", "GemmaDecoderLayer"),
    describe,
    always(True),
)
