"""One Transformer block: Algorithm 1 of Yu & Zhang 2024, or its parts in another wiring.

What varies is passed in as a value: how the parts are wired (`wiring.py`: `post_norm`, `pre_norm`), the FFN, and
how the weights are drawn (`initialisers.py`). Every station is a named module that passes its input
through, so a forward hook on `block.stations["after_attention"]` sees, or changes, Y₁.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from depthscope import stations
from depthscope.models.attention import Attention, AttentionScale
from depthscope.models.in_one import Plan, is_heard
from depthscope.models.initialisers import Initialiser, pytorch_default
from depthscope.models.wiring import Norm, Wiring, post_norm, pre_norm, wiring_of

FFN = Callable[[int, int], nn.Module]

__all__ = [
    "Block",
    "BlockConfig",
    "FeedForward",
    "Station",
    "post_norm",
    "pre_norm",
]


class Station(nn.Identity):
    """A point in a block where the token matrix is looked at or changed."""


class FeedForward(nn.Sequential):
    """φ(XW₁)W₂, φ = ReLU unless another activation is given."""

    def __init__(self, width: int, ffn_width: int, activation: Callable[[], nn.Module] = nn.ReLU, bias: bool = True):
        super().__init__(nn.Linear(width, ffn_width, bias=bias), activation(), nn.Linear(ffn_width, width, bias=bias))


# Of the parts of a block, as `Block.in_one` goes through them.
_KINDS = [nn.Linear] * 6 + [nn.LayerNorm] * 2 + [nn.ReLU] + [Station] * len(stations.BLOCK)


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

    def in_one(self, dtype: torch.dtype) -> tuple[Plan, list[Tensor]] | None:
        """The block in numbers, and its weights as `in_one.run` wants them; None if it has to be called.

        Every part must be what a block is built with, trained in this dtype, and heard by nobody.
        """
        parts: Any = self._modules  # asked in every step: twice as fast as through `__getattr__`
        attention, ffn, stations = parts.get("attention"), parts.get("ffn"), parts.get("stations")
        if [type(attention), type(ffn), type(stations)] != [Attention, FeedForward, nn.ModuleDict]:
            return None
        layers, passed, inner = [*ffn._modules.values()], [*stations._modules.values()], attention._modules
        linears = [*map(inner.get, ("query", "key", "value", "output")), *layers[::2]]
        norms = [parts.get("norm1"), parts.get("norm2")]
        kinds = [type(part) for part in (*linears, *norms, *layers[1::2], *passed)]
        if self.wiring.plan is None or kinds != _KINDS or attention.causal or norms[0].eps != norms[1].eps:
            return None
        if any(map(is_heard, (self, attention, ffn, layers[1], stations, *linears, *norms, *passed))):
            return None
        plan = replace(self.wiring.plan(self), heads=attention.heads, scale=attention.scale)
        weights = [part._parameters.get(name) for part in (*linears, *norms) for name in ("weight", "bias")]
        weights += [getattr(self, name) for name in plan.gains]
        for one in weights:
            if type(one) is not nn.Parameter or one.dtype != dtype or not one.requires_grad:
                return None
        return plan, weights

    def attend(self, x: Tensor, mask: Tensor | None, norm: Norm | None = None) -> Tensor:
        """What attention gives (batch, n, d), reading what `norm`, if there is one, makes of x."""
        return self.attention(self.stations["attention_input"](x if norm is None else norm(x)), mask)

    def enter_ffn(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """x on its way into the FFN."""
        return self.stations["ffn_input"](x)
