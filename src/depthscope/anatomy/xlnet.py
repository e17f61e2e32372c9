"""Hugging Face XLNet: post-norm, tokens on axis 0, projections as bare (d, h, k) parameters.

The attention branch is an einsum inside a method, and no module's output: that station is not seen.
"""

from __future__ import annotations

from typing import Any

from depthscope.anatomy.pieces import Piece, Role
from depthscope.anatomy.structure import BlockAnatomy, Family, Projections, Spot, post_norm_spots


def describe(name: str, layer: Any) -> BlockAnatomy:
    attention, ffn = layer.rel_attn, layer.ff

    def projections() -> Projections:
        q, k, v, o = (
            weight.detach().transpose(0, 1) for weight in (attention.q, attention.k, attention.v, attention.o)
        )
        roles: dict[Role, tuple[Piece, ...]] = {
            "queries_keys": (Piece(attention.q), Piece(attention.k)),
            "values_output": (Piece(attention.v), Piece(attention.o)),
        }
        return Projections(q, k, v, o.mT, roles=roles)  # all stored as (d, h, k)

    return BlockAnatomy(
        name,
        layer,
        spots=post_norm_spots(layer, attention.layer_norm, ffn.layer_norm) | {"ffn_branch": Spot(ffn.layer_2, "out")},
        placement="post",
        attention=attention,
        norms=(attention.layer_norm, ffn.layer_norm),
        ffn=(
            ffn.layer_1,
            ffn.layer_2,
        ),
        projections=projections,
    )


def causal(model: Any) -> bool:
    return getattr(getattr(model, "config", None), "attn_type", "bi") == "uni"


XLNET = Family("xlnet", "transformers", ("XLNetLayer",), describe, causal, token_axis=0)
