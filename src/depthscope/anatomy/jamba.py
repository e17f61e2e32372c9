"""Hugging Face Jamba: pre-norm blocks, some with attention and most with a Mamba mixer in its place, and an FFN."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.structure import BlockAnatomy, Family, always

LAYOUT = layouts.Layout("pre", "input_layernorm", "pre_ff_layernorm")


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention = getattr(layer, "self_attn", None)
    if attention is None:
        return replace(layouts.decoder_block(name, layer, LAYOUT, layer.mamba, layer.feed_forward), attention=None)
    shown = layouts.separate_projections(attention, attention.o_proj)
    return layouts.decoder_block(name, layer, LAYOUT, attention, layer.feed_forward, **shown)


JAMBA = Family(
    "jamba",
    "transformers",
    ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
    describe,
    always(True),
    notes=("some blocks have no attention, but a mixer in its place, whose branch is at attention_branch",),
)
