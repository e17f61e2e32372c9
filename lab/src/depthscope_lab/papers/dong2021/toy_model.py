"""The recurrent toy of Dong et al. 2021, Fig. 3: one attention layer that moves two points along a circle."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import Block, BlockConfig, FeedForward
from depthscope.models.wiring import Wired, Wiring
from depthscope_lab.papers.trained import steps

HEADS = 2
RADIUS = 0.3


@dataclass(frozen=True)
class Variant:
    """Which parts there are. `inner`: the skips around attention and FFN; `outer`: the layer adds to the points."""

    name: str
    mlp: bool = False
    inner: bool = False
    outer: bool = False


PLAIN, MLP = Variant("plain"), Variant("MLP", mlp=True)
INNER, OUTER = Variant("inner skip", inner=True), Variant("outer skip", outer=True)
BOTH, INNER_MLP = Variant("both skips", inner=True, outer=True), Variant("inner skip, MLP", mlp=True, inner=True)
VARIANTS = (PLAIN, MLP, INNER, INNER_MLP, OUTER, BOTH)


@dataclass(frozen=True)
class Training:
    """How a mover is trained to go from every place on the arcs to the next. `points` are those of the whole circle."""

    name: str
    points: int = 1000
    batch: int = 30
    epochs: int = 70
    rate: float = 1e-5
    falling: bool = False  # whether the rate falls to 0, along half a cosine
    every: int = 1  # only every so many places are learnt from
    deviation: float | None = None  # of the weights of the first and the last map; None: 1/√fan_in


# The authors' code: its batches go round the circle in order.
PRINTED = Training("as printed", deviation=0.02)
TRAINED = Training("trained", batch=10**6, epochs=1000, rate=3e-3, falling=True, every=4)
UNTRAINED = Training("not trained", epochs=0)


def wiring_of(variant: Variant) -> Wiring:
    """Norm(attention), with the variant's FFN and inner skips."""

    def run(block: Wired, x: Tensor, given: Any) -> Tensor:
        at = block.stations
        x = at["input"](x)
        branch = at["attention_branch"](block.attend(x, given))
        y = block.norm1(at["after_attention"](x + branch if variant.inner else branch))
        if variant.mlp:
            branch = at["ffn_branch"](block.ffn(block.enter_ffn(y, given)))
            y = block.norm2(at["after_ffn"](y + branch if variant.inner else branch))
        return at["output"](y)

    return Wiring(f"toy: {variant.name}", run, final_norm=False)


class Mover(nn.Module):
    """Points (batch, 2, 2) → where they are to be next (batch, 2, 2): Linear 2 → d, norm, one layer, Linear d → 2."""

    def __init__(self, width: int, variant: Variant, generator: torch.Generator, deviation: float | None = None):
        super().__init__()
        self.variant = variant
        self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, 2)
        self.norm = nn.LayerNorm(width)
        ffn = partial(FeedForward, activation=nn.GELU)
        self.block = Block(BlockConfig(width, HEADS, ffn_width=width, ffn=ffn, placement=wiring_of(variant)), generator)
        with torch.no_grad():
            for linear in (self.enter, self.leave):
                nn.init.normal_(linear.weight, std=deviation or linear.in_features**-0.5, generator=generator)
                nn.init.zeros_(linear.bias)

    def forward(self, points: Tensor) -> Tensor:
        moved = self.leave(self.block(self.norm(self.enter(points))))
        return points + moved if self.variant.outer else moved


def arcs(points: int) -> Tensor:
    """Two half circles, (points/2, 2, 2): two tokens that start opposite to one another, in even steps."""
    angles = torch.arange(points // 2, dtype=torch.float64) * (2 * math.pi / points)
    turned = torch.stack([angles, angles + math.pi], dim=1)  # (steps, tokens)
    return RADIUS * torch.stack([turned.cos(), turned.sin()], dim=-1)


def train(shape: Training, width: int, variant: Variant, seed: int) -> tuple[Mover, float]:
    """Teacher forcing. Returns the model, in float64, and how far off it is on the arcs.

    That is the mean squared distance to the next place in units of the squared length of a step: standing still has 1.
    """
    model = Mover(width, variant, torch.Generator().manual_seed(seed), shape.deviation)
    path = arcs(shape.points)
    now, following = (part[:: shape.every].float() for part in (path[:-1], path[1:]))
    batches = list(zip(now.split(shape.batch), following.split(shape.batch), strict=True))

    def loss_of(step: int) -> Tensor:
        here, there = batches[step % len(batches)]
        return F.mse_loss(model(here), there)

    def rate(step: int) -> float:
        epoch = step // len(batches)
        return shape.rate * ((1 + math.cos(math.pi * epoch / shape.epochs)) / 2 if shape.falling else 1.0)

    optimiser = torch.optim.Adam(model.parameters(), lr=shape.rate)
    for _step in steps(loss_of, optimiser, shape.epochs * len(batches), rate=rate):
        pass
    model = model.double().eval()
    with torch.no_grad():
        off = (model(path[:-1]) - path[1:]).square().sum() / (path[1:] - path[:-1]).square().sum()
    return model, float(off)


@torch.no_grad()
def run_free(model: Mover, start: Tensor, steps: int) -> Tensor:
    """Its own predictions fed back: (steps + 1, 2, 2), in the model's precision."""
    found = [start]
    for _ in range(steps):
        found.append(model(found[-1].unsqueeze(0)).squeeze(0))
    return torch.stack(found)
