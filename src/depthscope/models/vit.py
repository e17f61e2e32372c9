"""Vision Transformer (Dosovitskiy et al. 2021): patches, positions, blocks, a linear head."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from depthscope.models.block import BlockConfig
from depthscope.models.encoder import Encoder


class VisionTransformer(nn.Module):
    """Images (batch, channels, s, s) → class scores (batch, classes).

    `pool="class"` reads a class token, which stands first; `pool="mean"` averages the patches and has
    no class token. Mean pooling cannot be combined with complete de-escalation (τ = 1) at the last
    output: the mean is then zero for every image. `final_norm=None`: as the blocks' wiring asks for.
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

        fan_in = channels * patch_size**2
        nn.init.normal_(self.embed.weight, std=fan_in**-0.5, generator=generator)
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
