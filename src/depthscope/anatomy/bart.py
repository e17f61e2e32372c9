"""The layers of BART and its kin in Hugging Face: `self_attn`, `encoder_attn` in decoders, `fc1`, `fc2`, a norm each.

BART, Marian and Blenderbot-small have their norms behind the sums; mBART, Pegasus, M2M-100, Blenderbot and Whisper
before the branches. The modules are named alike, so that the class alone tells.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Spot,
    branch_spots,
    cross_attention_spots,
    linear_projections,
    post_norm_spots,
    pre_norm_spots,
)
from depthscope.stations import Placement


def describe(placement: Placement, name: str, layer: Any) -> BlockAnatomy:
    attention, norms = layer.self_attn, (layer.self_attn_layer_norm, layer.final_layer_norm)
    spots = (pre_norm_spots if placement == "pre" else post_norm_spots)(layer, *norms)
    crosses = hasattr(layer, "encoder_attn") and _reads_an_encoder(getattr(attention, "config", None))
    if crosses:
        spots |= cross_attention_spots(layer.encoder_attn.out_proj, layer.encoder_attn_layer_norm, norms, placement)
    return BlockAnatomy(
        name,
        layer,
        spots=spots | branch_spots(attention.out_proj, layer.fc2),
        placement=placement,
        attention=attention,
        cross_attention=layer.encoder_attn if crosses else None,
        norms=norms,
        causal=bool(attention.is_decoder),
        values=Spot(attention.v_proj, "out"),
        context=Spot(attention.out_proj, "in"),
        ffn=(layer.fc1, layer.fc2),
        projections=lambda: linear_projections(
            attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, attention.num_heads
        ),
    )


def _reads_an_encoder(config: Any) -> bool:
    """A decoder that is a language model by itself has its cross-attention too, and never calls it."""
    return bool(getattr(config, "is_encoder_decoder", True) or getattr(config, "add_cross_attention", False))


def causal(_model: Any) -> None:
    """Every block says it of itself."""


def _layers(*models: str) -> tuple[str, ...]:
    return tuple(f"{model}{half}Layer" for model in models for half in ("Encoder", "Decoder"))


BART = Family(
    "bart",
    "transformers",
    (*_layers("Bart", "Marian", "BlenderbotSmall", "PLBart"), "TrOCRDecoderLayer"),
    partial(describe, "post"),
    causal,
)
BART_PRE = Family(
    "bart-pre",
    "transformers",
    (*_layers("MBart", "Pegasus", "M2M100", "Blenderbot", "Whisper", "Speech2Text"), "PegasusXDecoderLayer"),
    partial(describe, "pre"),
    causal,
)
