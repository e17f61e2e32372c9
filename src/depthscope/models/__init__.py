"""Reference models, each read in one sitting: what Yu & Zhang's Algorithm 1 says, and what stands on it."""

from depthscope.models.attention import Attention
from depthscope.models.block import Block, BlockConfig, FeedForward, Station
from depthscope.models.encoder import CausalLM, Encoder, VisionTransformer
from depthscope.models.initialisers import INITIALISERS, paper_text, pytorch_default, theorem, xavier
from depthscope.models.wiring import WIRINGS, Wiring, post_norm, pre_norm

__all__ = [
    "INITIALISERS",
    "WIRINGS",
    "Attention",
    "Block",
    "BlockConfig",
    "CausalLM",
    "Encoder",
    "FeedForward",
    "Station",
    "VisionTransformer",
    "Wiring",
    "paper_text",
    "post_norm",
    "pre_norm",
    "pytorch_default",
    "theorem",
    "xavier",
]
