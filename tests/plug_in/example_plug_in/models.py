"""A model that depthscope does not know."""

import torch
from torch import Tensor, nn


class SoftBlock(nn.Module):
    """Pre-norm, with a mean in the place of attention."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.ffn = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.mix(self.first(x)).mean(dim=1, keepdim=True).expand_as(x)
        return y + self.ffn(self.second(y))


class Soft(nn.Module):
    """A few such blocks."""

    def __init__(self, depth: int = 3, width: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList(SoftBlock(width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def make() -> tuple[Soft, Tensor]:
    """A model and its input, for `depthscope probe example_plug_in.models:make`."""
    return Soft(), torch.randn(4, 9, 16)
