"""The layers of CLIP and SigLIP in Hugging Face, in vision and text towers: pre-norm, `layer_norm1`, `layer_norm2`.

CLIP's text tower is causal, SigLIP's is not, and vision towers never are.
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
    pre_norm_spots,
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.layer_norm1, layer.layer_norm2) | branch_spots(attention.out_proj, layer.mlp),
        placement="pre",
        attention=attention,
        norms=(layer.layer_norm1, layer.layer_norm2),
        causal=type(layer).__name__ in CLIP.block_classes and "Text" in type(attention.config).__name__,
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.out_proj, "in"),
        ffn=(layer.mlp,),
        projections=lambda: linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, attention.num_heads
        ),
    )


CLIP = Family(
    "clip",
    "transformers",
    ("CLIPEncoderLayer", "CLIPSegEncoderLayer", "MetaClip2EncoderLayer", "OwlViTEncoderLayer", "Owlv2EncoderLayer"),
    describe,
    always(False),
)
SIGLIP = Family("siglip", "transformers", ("SiglipEncoderLayer", "Siglip2EncoderLayer"), describe, always(False))
