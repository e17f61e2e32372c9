"""Hugging Face wav2vec 2.0 and its kin (HuBERT, UniSpeech): post-norm, or pre-norm in the "stable" layers."""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    always,
    branch_spots,
    linear_projections,
    post_norm_spots,
    pre_norm_spots,
)
from depthscope.stations import Placement


def describe(placement: Placement, name: str, layer: Any) -> BlockAnatomy:
    attention, norms = layer.attention, (layer.layer_norm, layer.final_layer_norm)
    spots = (pre_norm_spots if placement == "pre" else post_norm_spots)(layer, *norms)
    spots |= branch_spots(attention.out_proj, layer.feed_forward)
    if (
        getattr(layer, "adapter_layer", None) is not None
    ):  # it stands between the FFN's sum, which is not seen, and the end
        del spots["after_ffn"], spots["ffn_branch"]
    return BlockAnatomy(
        name,
        layer,
        spots=spots,
        placement=placement,
        attention=attention,
        norms=norms,
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.out_proj, "in"),
        ffn=(layer.feed_forward,),
        projections=lambda: linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, attention.num_heads
        ),
    )


_MODELS = ("Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat")
WAV2VEC2 = Family(
    "wav2vec2",
    "transformers",
    tuple(f"{model}EncoderLayer" for model in _MODELS),
    partial(describe, "post"),
    always(False),
)
WAV2VEC2_STABLE = Family(
    "wav2vec2-stable",
    "transformers",
    tuple(f"{model}EncoderLayerStableLayerNorm" for model in _MODELS),
    partial(describe, "pre"),
    always(False),
)
