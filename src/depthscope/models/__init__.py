"""Reference models, each read in one sitting: what Yu & Zhang's Algorithm 1 says, and what stands on it."""

from depthscope.models.attention import Attention
from depthscope.models.block import Block, BlockConfig, FeedForward, Station
from depthscope.models.carried_mean import CarriedMean
from depthscope.models.encoder import Encoder
from depthscope.models.initialisers import INITIALISERS, paper_text, pytorch_default, theorem, xavier
from depthscope.models.language import CausalLM
from depthscope.models.normed_wirings import (
    b2t,
    hybrid_norm,
    mix_norm,
    peri_norm,
    res_post_norm,
    residual_twice,
    sandwich,
)
from depthscope.models.transformer_xl import TransformerXL, TransformerXLConfig
from depthscope.models.vit import VisionTransformer
from depthscope.models.weighted_wirings import (
    admin,
    deep_norm,
    keel,
    layer_norm_scaling,
    layer_scale,
    over_root_depth,
    rezero,
)
from depthscope.models.wiring import WIRINGS, Wiring, post_norm, pre_norm

__all__ = [
    "INITIALISERS",
    "WIRINGS",
    "Attention",
    "Block",
    "BlockConfig",
    "CarriedMean",
    "CausalLM",
    "Encoder",
    "FeedForward",
    "Station",
    "TransformerXL",
    "TransformerXLConfig",
    "VisionTransformer",
    "Wiring",
    "admin",
    "b2t",
    "deep_norm",
    "hybrid_norm",
    "keel",
    "layer_norm_scaling",
    "layer_scale",
    "mix_norm",
    "over_root_depth",
    "paper_text",
    "peri_norm",
    "post_norm",
    "pre_norm",
    "pytorch_default",
    "res_post_norm",
    "residual_twice",
    "rezero",
    "sandwich",
    "theorem",
    "xavier",
]
