"""Hugging Face BLIP: a vision tower (also BLIP-2's), pre-norm with fused projections, and a text tower like BERT's.

Whether the text tower is causal, and whether it attends to the image, is a matter of each call of its model. Its blocks
say neither: a remedy is careful then, and what stands behind a cross-attention that may not run is not shown.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from depthscope.anatomy import bert
from depthscope.anatomy.fused import stacked_values
from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    FusedValues,
    Spot,
    always,
    branch_spots,
    fused_projections,
    pre_norm_spots,
)
from depthscope.stations import CROSS


def describe_vision(name: str, layer: Any) -> BlockAnatomy:
    attention = layer.self_attn
    return BlockAnatomy(
        name,
        layer,
        spots=pre_norm_spots(layer, layer.layer_norm1, layer.layer_norm2)
        | branch_spots(attention.projection, layer.mlp),
        placement="pre",
        attention=attention,
        norms=(layer.layer_norm1, layer.layer_norm2),
        context=Spot(attention.projection, "in"),
        fused_values=FusedValues(
            Spot(attention.qkv, "out"), partial(stacked_values, heads=attention.num_heads, groups=attention.num_heads)
        ),
        ffn=(layer.mlp,),
        projections=lambda: fused_projections(
            attention.qkv.weight,
            attention.qkv.bias,
            attention.projection.weight,
            attention.projection.bias,
            attention.num_heads,
            linear=True,
        ),
    )


def describe_text(name: str, layer: Any) -> BlockAnatomy:
    like_bert = bert.describe(name, layer)
    doubtful = {*CROSS, "ffn_input"} if like_bert.cross_attention is not None else set()
    spots = {station: spot for station, spot in like_bert.spots.items() if station not in doubtful}
    return replace(like_bert, spots=spots, causal=None)


def unknown(_model: Any) -> None:
    """An argument of the text model's call decides."""


BLIP_VISION = Family(
    "blip-vision",
    "transformers",
    ("BlipEncoderLayer", "Blip2EncoderLayer"),
    describe_vision,
    always(False),
    mask_argument=None,
)
BLIP_TEXT = Family("blip-text", "transformers", ("BlipTextLayer",), describe_text, unknown)
