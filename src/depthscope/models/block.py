"""One Transformer block: Algorithm 1 of Yu & Zhang 2024, and its pre-norm sibling (eq. 19).

What varies is passed in as a value: where the norms stand (`post_norm`, `pre_norm`), the FFN, and
how the weights are drawn (`initialisers.py`). Every station is a named module that passes its input
through, so a forward hook on `block.stations["after_attention"]` sees, or changes, Y₁.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthscope.models.attention import Attention, AttentionScale
from depthscope.models.initialisers import Initialiser, pytorch_default

TRUNK_STATIONS = ("input", "after_attention", "ffn_input", "after_ffn", "output")
BRANCH_STATIONS = ("attention_input", "attention_branch", "ffn_branch")
STATIONS = TRUNK_STATIONS + BRANCH_STATIONS

NormPlacement = Callable[["Block", Tensor, Tensor | None], Tensor]
FFN = Callable[[int, int], nn.Module]


class Station(nn.Identity):
    """A point in a block where the token matrix is looked at or changed."""


class FeedForward(nn.Sequential):
    """φ(XW₁)W₂, φ = ReLU unless another activation is given."""

    def __init__(self, width: int, ffn_width: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True):
        super().__init__(nn.Linear(width, ffn_width, bias=bias), activation(), nn.Linear(ffn_width, width, bias=bias))


def post_norm(block: Block, x: Tensor, mask: Tensor | None) -> Tensor:
    """Algorithm 1 of Yu & Zhang 2024: the classic Transformer, norms on the trunk."""
    at = block.stations
    x = at["input"](x)  # X
    attended = at["attention_branch"](block.attention(at["attention_input"](x), mask))
    y1 = at["after_attention"](x + block.alpha * attended)
    y2 = at["ffn_input"](block.norm1(y1))
    y3 = at["after_ffn"](y2 + at["ffn_branch"](block.ffn(y2)))
    return at["output"](block.norm2(y3))  # Y4


def pre_norm(block: Block, x: Tensor, mask: Tensor | None) -> Tensor:
    """Yu & Zhang 2024, eq. 19: norms on the branches, an untouched trunk."""
    at = block.stations
    x = at["input"](x)
    normed = at["attention_input"](block.norm1(x))  # X̂
    y = at["after_attention"](x + block.alpha * at["attention_branch"](block.attention(normed, mask)))
    z = at["after_ffn"](y + at["ffn_branch"](block.ffn(at["ffn_input"](block.norm2(y)))))
    return at["output"](z)


@dataclass(frozen=True)
class BlockConfig:
    """What a block is made of. The defaults are a classic post-norm block as PyTorch would build it."""

    width: int = 512
    heads: int = 8
    ffn_width: int | None = None  # 4 × width
    alpha: float = 1.0  # weight of the attention branch, Algorithm 1
    causal: bool = False
    output_projection: bool = True  # False: no W_O, as in Prop. 2.9
    scale: AttentionScale = "head_width"  # "width": scores over √d, as in eq. 2
    attention_bias: bool = True
    ffn: FFN = FeedForward  # (width, ffn_width) → module
    norm_eps: float = 1e-5
    placement: NormPlacement = post_norm
    initialise: Initialiser = pytorch_default


class Block(nn.Module):
    """One block. `generator` makes the weights reproducible without touching the global seed."""

    def __init__(self, config: BlockConfig = BlockConfig(), generator: torch.Generator | None = None):
        super().__init__()
        width = config.width
        self.config = config
        self.alpha = config.alpha
        self.attention = Attention(
            width,
            config.heads,
            causal=config.causal,
            output_projection=config.output_projection,
            scale=config.scale,
            bias=config.attention_bias,
        )
        self.ffn = config.ffn(width, config.ffn_width or 4 * width)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.stations = nn.ModuleDict({name: Station() for name in STATIONS})
        config.initialise(self.attention, self.ffn, generator)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (batch, n, d), mask (batch, n) true for real tokens → (batch, n, d)."""
        return self.config.placement(self, x, mask)
