"""Stacks of blocks: token matrices (`Encoder`), token ids (`CausalLM`) or images (`VisionTransformer`) go in."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models.block import Block, BlockConfig
from depthscope.models.wiring import wiring_of


class Encoder(nn.Module):
    """`depth` blocks, each with weights of its own: token matrix in, token matrix out.

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
        self.second_stream = wiring.second_stream
        self.blocks = nn.ModuleList(Block(block, generator, number, depth) for number in range(1, depth + 1))
        ends_with_norm = wiring.final_norm if final_norm is None else final_norm
        self.final_norm = nn.LayerNorm(block.width, eps=block.norm_eps) if ends_with_norm else nn.Identity()

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


class CausalLM(nn.Module):
    """Embedding, learned positions, causal blocks, tied head (as in GPT-2).

    Token ids (batch, n) → logits (batch, n, vocabulary); the blocks are made causal whatever `block` says.
    """

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


class VisionTransformer(nn.Module):
    """Patches, positions, blocks, a linear head (Dosovitskiy et al. 2021).

    Images (batch, channels, s, s) → class scores (batch, classes). `pool="class"` reads a class token, which stands
    first; `pool="mean"` averages the patches and has no class token. Mean pooling cannot be combined with complete
    de-escalation (τ = 1) at the last output: the mean is then zero for every image. `final_norm=None`: as the blocks'
    wiring asks for.
    """

    def __init__(
        self,
        depth: int,
        block: BlockConfig = BlockConfig(),
        *,
        image_size: int = 32,
        patch_size: int = 4,
        channels: int = 3,
        classes: int = 10,
        pool: Literal["class", "mean"] = "class",
        final_norm: bool | None = None,
        generator: torch.Generator | None = None,
    ):
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"expected patches that divide the image, got image {image_size} and patch {patch_size}")
        if pool not in ("class", "mean"):
            raise ValueError(f'expected pool="class" or "mean", got {pool!r}')
        patches = (image_size // patch_size) ** 2
        self.embed = nn.Conv2d(channels, block.width, kernel_size=patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, block.width)) if pool == "class" else None
        self.positions = nn.Parameter(torch.zeros(1, patches + (pool == "class"), block.width))
        self.encoder = Encoder(depth, block, final_norm, generator)
        self.head = nn.Linear(block.width, classes)

        nn.init.normal_(self.embed.weight, std=(channels * patch_size**2) ** -0.5, generator=generator)
        nn.init.zeros_(self.embed.bias)  # type: ignore[arg-type]
        for embedding in (self.positions, self.class_token):
            if embedding is not None:
                nn.init.normal_(embedding, std=0.02, generator=generator)  # as in Hugging Face's ViT
        nn.init.normal_(self.head.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(-2).mT  # (batch, patches, d)
        if self.class_token is not None:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        x = self.encoder(x + self.positions)  # (batch, n, d)
        return self.head(x.mean(dim=1) if self.class_token is None else x[:, 0])
