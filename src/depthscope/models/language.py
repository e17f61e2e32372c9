"""A causal language model: embedding, learned positions, causal blocks, tied head (as in GPT-2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models.block import BlockConfig
from depthscope.models.encoder import Encoder


class CausalLM(nn.Module):
    """Token ids (batch, n) → logits (batch, n, vocabulary); the blocks are made causal whatever `block` says."""

    def __init__(
        self,
        depth: int,
        block: BlockConfig = BlockConfig(),
        *,
        vocabulary: int,
        context: int = 1024,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(vocabulary, block.width)
        self.positions = nn.Embedding(context, block.width)
        self.encoder = Encoder(depth, replace(block, causal=True), generator=generator)
        for embedding in (self.embedding, self.positions):
            nn.init.normal_(embedding.weight, std=0.02, generator=generator)  # GPT-2's

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        n = ids.shape[-1]
        if n > self.context:
            raise ValueError(f"expected at most {self.context} tokens, the model's context, got {n}")
        x = self.embedding(ids) + self.positions.weight[:n]  # (batch, n, d)
        return F.linear(self.encoder(x, mask), self.embedding.weight)
