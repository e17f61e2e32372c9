"""PyTorch's `nn.TransformerEncoderLayer`, by default with tokens on axis 0."""

from __future__ import annotations

from torch import nn

from depthscope.anatomy.structure import (
    BlockAnatomy,
    Family,
    Projections,
    branch_spots,
    fused_projections,
    post_norm_spots,
    pre_norm_spots,
)


def describe(name: str, layer: nn.Module) -> BlockAnatomy:
    assert isinstance(layer, nn.TransformerEncoderLayer)
    attention = layer.self_attn
    spots = pre_norm_spots if layer.norm_first else post_norm_spots
    return BlockAnatomy(
        name,
        layer,
        spots=spots(layer, layer.norm1, layer.norm2) | branch_spots(layer.dropout1, layer.dropout2),
        placement="pre" if layer.norm_first else "post",
        attention=attention,
        norms=(layer.norm1, layer.norm2),
        # forward(src, src_mask, src_key_padding_mask, is_causal)
        causal_arguments=if_plain(layer, nn.TransformerEncoderLayer, {"src_mask": 1, "is_causal": 3}),
        ffn=(
            layer.linear1,
            layer.linear2,
        ),
        projections=lambda: projections_of(attention),
    )


def if_plain(layer: nn.Module, kind: type[nn.Module], arguments: dict[str, int]) -> dict[str, int]:
    """What a call of PyTorch's own layer says of causality; nothing where attention may have a mask of its own."""
    is_own = getattr(type(layer), "_sa_block", None) is getattr(kind, "_sa_block", None)
    return arguments if is_own and type(layer.self_attn) is nn.MultiheadAttention else {}


def projections_of(attention: nn.MultiheadAttention) -> Projections:
    """Those of PyTorch's own attention, where queries, keys and values have one width."""
    return fused_projections(
        attention.in_proj_weight,
        attention.in_proj_bias,
        attention.out_proj.weight,
        attention.out_proj.bias,
        attention.num_heads,
        linear=True,
    )


def unknown(_model: nn.Module) -> None:
    """Causality is an argument of each call, not a property of the module."""


def token_axis(layer: nn.Module) -> int:
    return 1 if layer.self_attn.batch_first else 0  # type: ignore[union-attr]


TORCH_ENCODER = Family(
    "torch",
    "torch",
    ("TransformerEncoderLayer",),
    describe,
    unknown,
    mask_argument="src_key_padding_mask",
    token_axis_of=token_axis,
)
