"""The networks of Dong et al. 2021, Fig. 4, of our blocks: embedding, attention with skips and norms, a readout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.models import Block, BlockConfig, Encoder, FeedForward
from depthscope.models.wiring import Wired, Wiring, post_norm


def run_attention_alone(block: Wired, x: Tensor, given: Any) -> Tensor:
    """Norm(X + attention): a post-norm block without an FFN."""
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + block.alpha * at["attention_branch"](block.attend(x, given)))
    return at["output"](block.norm1(y))


def _without_ffn(block: Any) -> None:
    block.ffn, block.norm2 = nn.Identity(), nn.Identity()


attention_alone = Wiring("attention alone", run_attention_alone, final_norm=False, prepare=_without_ffn)


@dataclass(frozen=True)
class Shape:
    """Table of the paper's sizes: L layers of H heads, d wide; the FFN, where there is one, is d wide too."""

    depth: int
    heads: int
    width: int
    ffn: bool = False
    positions: bool = False


class Network(nn.Module):
    """Inputs (batch, n) of ids or (batch, n, 2) of points → scores (batch, n, classes) of every token.

    As the authors': ids (and places, if asked for) are embedded, go through a linear map and a LayerNorm; points go
    through an FFN of two layers with GELU and a LayerNorm. There is no dropout, which the authors have.
    """

    def __init__(
        self, shape: Shape, *, classes: int, vocabulary: int, tokens: int, generator: torch.Generator | None = None
    ):
        super().__init__()
        self.shape = shape
        width = shape.width
        self.words = nn.Embedding(vocabulary, width) if vocabulary else None
        self.places = nn.Embedding(tokens, width) if shape.positions else None
        self.enter = (
            nn.Linear(width, width)
            if vocabulary
            else nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        )
        self.norm = nn.LayerNorm(width)
        config = BlockConfig(
            width,
            shape.heads,
            ffn_width=width,
            ffn=partial(FeedForward, activation=nn.GELU),
            placement=post_norm if shape.ffn else attention_alone,
        )
        self.encoder = Encoder(shape.depth, config, generator=generator)
        self.head = nn.Linear(width, classes)
        with torch.no_grad():
            for module in (self.words, self.places, *self.enter.modules(), self.head):
                if isinstance(module, nn.Linear | nn.Embedding):
                    std = 1.0 if isinstance(module, nn.Embedding) else module.in_features**-0.5
                    nn.init.normal_(module.weight, std=std, generator=generator)
                if isinstance(module, nn.Linear):
                    nn.init.zeros_(module.bias)

    def embed(self, inputs: Tensor) -> Tensor:
        """What enters the first block (batch, n, d)."""
        x = inputs.to(self.head.weight.dtype) if self.words is None else self.words(inputs)
        if self.places is not None:
            x = x + self.places.weight[: x.shape[1]]
        return self.norm(self.enter(x))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(inputs)))

    @property
    def blocks(self) -> list[Block]:
        """The blocks, first to last."""
        found = list(self.encoder.blocks)
        assert all(isinstance(block, Block) for block in found)
        return found  # type: ignore[return-value]
