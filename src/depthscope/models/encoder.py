"""A stack of blocks: token matrix in, token matrix out. The trunk of every model here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthscope.models.block import Block, BlockConfig
from depthscope.models.wiring import wiring_of


class Encoder(nn.Module):
    """`depth` blocks, each with weights of its own.

    `final_norm=None` puts a LayerNorm last if the blocks' wiring asks for it: the output of post-norm blocks is
    normed already. Causal blocks make it a decoder trunk.
    """

    def __init__(
        self,
        depth: int,
        block: BlockConfig = BlockConfig(),
        final_norm: bool | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if depth < 1:
            raise ValueError(f"expected a depth of at least 1 block, got {depth}")
        wiring = wiring_of(block.placement)
        if final_norm is None:
            final_norm = wiring.final_norm
        self.second_stream = wiring.second_stream
        self.blocks = nn.ModuleList(Block(block, generator, number, depth) for number in range(1, depth + 1))
        self.final_norm = nn.LayerNorm(block.width, eps=block.norm_eps) if final_norm else nn.Identity()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x (batch, n, d), mask (batch, n) true for real tokens → (batch, n, d)."""
        if self.second_stream:
            beside = x
            for block in self.blocks:
                x, beside = block(x, mask, beside)
            return x + self.final_norm(beside)
        for block in self.blocks:
            x = block(x, mask)
        return self.final_norm(x)
