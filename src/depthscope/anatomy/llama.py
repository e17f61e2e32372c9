"""Hugging Face Llama and the many decoders of its layout: pre-norm, causal, grouped-query attention.

Granite multiplies its branches by a number before it adds them: where that is not 1, no module shows what is added
(the use of depth takes it from the trunk before and after).
StableLM may run its branches in parallel. The sink of gpt-oss is a last column of attention's softmax.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.structure import BlockAnatomy, Family, causal_unless_told
from depthscope.stations import BRANCHES


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    parallel = getattr(layer, "use_parallel_residual", False)
    block = layouts.decoder_block(
        name,
        layer,
        layouts.ONE_NORM[0] if parallel else layouts.LLAMA,
        attention,
        layer.mlp,
        extra_keys=1 if hasattr(attention, "sinks") else 0,
        **layouts.separate_projections(attention, attention.o_proj),
    )
    if getattr(layer, "residual_multiplier", 1) == 1:
        return block
    return replace(block, spots={s: spot for s, spot in block.spots.items() if s not in BRANCHES})


LLAMA = Family(
    "llama",
    "transformers",
    (
        "LlamaDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "Qwen2MoeDecoderLayer",
        "Qwen3MoeDecoderLayer",
        "MistralDecoderLayer",
        "MixtralDecoderLayer",
        "GemmaDecoderLayer",
        "StableLmDecoderLayer",
        "Starcoder2DecoderLayer",
        "GraniteDecoderLayer",
        "SmolLM3DecoderLayer",
        "GptOssDecoderLayer",
    ),
    describe,
    causal_unless_told,
)
