"""Hugging Face GPT-J: parallel branches that read one norm."""

from __future__ import annotations

from typing import Any

from depthscope.anatomy import layouts
from depthscope.anatomy.structure import BlockAnatomy, Family, causal_unless_told


def describe(name: str, layer: Any) -> BlockAnatomy:
    shown = layouts.separate_projections(layer.attn, layer.attn.out_proj)
    return layouts.decoder_block(name, layer, layouts.Layout("parallel", "ln_1"), layer.attn, layer.mlp, **shown)


GPTJ = Family("gptj", "transformers", ("GPTJBlock",), describe, causal_unless_told)
