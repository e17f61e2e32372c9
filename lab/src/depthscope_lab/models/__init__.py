"""Models for training: the wirings of other papers, Transformer-XL."""

from depthscope_lab.models.carried_mean import CarriedMean
from depthscope_lab.models.normed_wirings import (
    b2t,
    hybrid_norm,
    mix_norm,
    peri_norm,
    res_post_norm,
    residual_twice,
    sandwich,
)
from depthscope_lab.models.transformer_xl import TransformerXL, TransformerXLConfig
from depthscope_lab.models.weighted_wirings import (
    admin,
    deep_norm,
    keel,
    layer_norm_scaling,
    layer_scale,
    over_root_depth,
    rezero,
)

# What the entry point in `depthscope.wirings` names.
PUBLISHED = [
    *(rezero, layer_scale, over_root_depth, layer_norm_scaling, deep_norm, admin, keel),
    *(sandwich, peri_norm, res_post_norm, b2t, residual_twice, mix_norm, hybrid_norm),
]

__all__ = [
    "PUBLISHED",
    "CarriedMean",
    "TransformerXL",
    "TransformerXLConfig",
    "admin",
    "b2t",
    "deep_norm",
    "hybrid_norm",
    "keel",
    "layer_norm_scaling",
    "layer_scale",
    "mix_norm",
    "over_root_depth",
    "peri_norm",
    "res_post_norm",
    "residual_twice",
    "rezero",
    "sandwich",
]
