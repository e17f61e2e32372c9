"""One Transformer block: Algorithm 1 of Yu & Zhang 2024, or its parts in another wiring.

What varies is passed in as a value: how the parts are wired (`wiring.py`: `post_norm`, `pre_norm`), the FFN, and
how the weights are drawn (`initialisers.py`). Every station is a named module that passes its input
through, so a forward hook on `block.stations["after_attention"]` sees, or changes, Y₁.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthscope import stations
from depthscope.models.attention import Attention, AttentionScale
from depthscope.models.initialisers import Initialiser, pytorch_default
from depthscope.models.wiring import Norm, Wiring, post_norm, wiring_of

FFN = Callable[[int, int], nn.Module]


class Station(nn.Identity):
    """A point in a block where the token matrix is looked at or changed."""


class FeedForward(nn.Sequential):
    """φ(XW₁)W₂, φ = ReLU unless another activation is given."""

    def __init__(self, width: int, ffn_width: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True):
        super().__init__(nn.Linear(width, ffn_width, bias=bias), activation(), nn.Linear(ffn_width, width, bias=bias))


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
    placement: Wiring | str = post_norm  # a wiring, or the name of one
    initialise: Initialiser = pytorch_default


class Block(nn.Module):
    """One block. `generator` makes the weights reproducible without touching the global seed.

    `number` and `depth` say which block of a stack it is, for wirings that differ by it.
    """

    def __init__(
        self,
        config: BlockConfig = BlockConfig(),
        generator: torch.Generator | None = None,
        number: int = 1,
        depth: int = 1,
    ):
        super().__init__()
        width = config.width
        self.config = config
        self.wiring = wiring_of(config.placement)
        self.number, self.depth = number, depth
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
        self.stations = nn.ModuleDict({name: Station() for name in stations.BLOCK})
        config.initialise(self.attention, self.ffn, generator)
        self.wiring.prepare(self)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, beside: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x (batch, n, d), mask (batch, n) true for real tokens → (batch, n, d).

        Where the wiring has a second stream, `beside` is what it has reached (None: it begins with x), and what leaves
        the block is x and the second stream.
        """
        if self.wiring.second_stream:
            return self.wiring.forward(self, x, mask, x if beside is None else beside)
        return self.wiring.forward(self, x, mask)

    def attend(self, x: Tensor, mask: Tensor | None, norm: Norm | None = None) -> Tensor:
        """What attention gives (batch, n, d), reading what `norm`, if there is one, makes of x."""
        return self.attention(self.stations["attention_input"](x if norm is None else norm(x)), mask)

    def enter_ffn(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x on its way into the FFN."""
        return self.stations["ffn_input"](x)
