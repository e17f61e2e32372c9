"""A stack of blocks: token matrix in, token matrix out. The trunk of every model here."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from depthscope.models import in_one
from depthscope.models.block import Block, BlockConfig
from depthscope.models.wiring import wiring_of


class Encoder(nn.Module):
    """`depth` blocks, each with weights of its own.

    `final_norm=None` puts a LayerNorm last if the blocks' wiring asks for it: the output of post-norm blocks is
    normed already. Causal blocks make it a decoder trunk.
    `at_once = True` trains all blocks as one operation where that is possible (`in_one.py`): faster if they are narrow,
    the same up to rounding. It is not the default, since a pass that somebody listens to is rounded otherwise.
    """

    at_once = False

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
        if self.at_once and self.training and mask is None and (found := self._in_one(x)) is not None:
            return self.final_norm(in_one.run(x, *found, self))  # type: ignore[no-any-return]
        for block in self.blocks:
            x = block(x, mask)
        return self.final_norm(x)

    def _in_one(self, x: Tensor) -> tuple[list[in_one.Plan], list[Tensor]] | None:
        """The blocks in numbers, and their weights; None if they are to be run one by one."""
        if not in_one.may_run(x):
            return None
        plans, weights = [], []
        for block in self.blocks:
            found = block.in_one(x.dtype) if type(block) is Block else None
            if found is None:
                return None
            plans.append(found[0])
            weights += found[1]
        return plans, weights
