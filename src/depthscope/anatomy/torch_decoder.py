"""PyTorch's `nn.TransformerDecoderLayer`, also in `nn.Transformer`, by default with tokens on axis 0."""

from __future__ import annotations

from torch import nn

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    branch_spots,
    cross_attention_spots,
    post_norm_spots,
    pre_norm_spots,
)
from depthscope.anatomy.torch_encoder import if_plain, projections_of, token_axis, unknown
from depthscope.stations import Placement


def describe(name: str, layer: nn.Module) -> BlockAnatomy:
    assert isinstance(layer, nn.TransformerDecoderLayer)
    placement: Placement = "pre" if layer.norm_first else "post"
    norms = layer.norm1, layer.norm3
    spots = (pre_norm_spots if layer.norm_first else post_norm_spots)(layer, *norms)
    spots |= cross_attention_spots(layer.dropout2, layer.norm2, norms, placement)
    attention = layer.self_attn
    return BlockAnatomy(
        name,
        layer,
        spots=spots | branch_spots(layer.dropout1, layer.dropout3),
        placement=placement,
        attention=attention,
        cross_attention=layer.multihead_attn,
        norms=norms,
        # forward(tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask, tgt_is_causal, …)
        causal_arguments=if_plain(layer, nn.TransformerDecoderLayer, {"tgt_mask": 2, "tgt_is_causal": 6}),
        ffn=(layer.linear1, layer.linear2),
        projections=lambda: projections_of(attention),
    )


TORCH_DECODER = Family(
    "torch-decoder",
    "torch",
    ("TransformerDecoderLayer",),
    describe,
    unknown,
    mask_argument="tgt_key_padding_mask",
    token_axis_of=token_axis,
)
