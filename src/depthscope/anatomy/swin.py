"""Hugging Face Swin: pre-norm blocks that attend within windows, in stages.

A stage is no block: between two stages patches are merged, so that tokens become fewer and wider. Each stage is a part
of its own. Its tokens are those of the whole image, and so are the similarities; attention mixes them within a window
only, and the windows are shifted from block to block. What stands inside the windows (values, context) has another
layout, and attention is seen where one window is the whole image.
"""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    always,
    branch_spots,
    linear_projections,
    pre_norm_spots,
)

NOTE = (
    "windows: similarity is over all tokens of an image, attention mixes within a window; between two stages patches "
    "are merged, so every stage is a part of its own"
)


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.attention
    numbers = [int(word) for word in name.split(".") if word.isdigit()]  # layers.STAGE.blocks.BLOCK
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.layernorm_before, layer.layernorm_after)
        | branch_spots(layer.drop_path, layer.mlp),
        placement="pre",
        attention=attention,
        norms=(layer.layernorm_before, layer.layernorm_after),
        ffn=(layer.mlp,),
        projections=lambda: linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, attention.num_attention_heads
        ),
        part=f"stage {numbers[-2] + 1}" if len(numbers) > 1 else "",
    )


SWIN = Family("swin", "transformers", ("SwinLayer",), describe, always(False), mask_argument=None, notes=(NOTE,))
