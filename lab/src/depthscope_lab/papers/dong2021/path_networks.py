"""A trained network taken apart by length of path, in the two ways that are both called "paths".

*Frozen*: attention, the scales of the norms and the gates of the FFN stay as they are in the whole network. All is
linear then, and the sums over all paths of each length are the terms of Thm 2.1: with the constant part that the biases
make they add up to what leaves the last block (`frozen_terms`).

*Recomputed*: what the authors' code evaluates. Every path is a network of its own, which computes its attention and its
norms from its own tokens (`recomputed_sums`); these are no terms of anything.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.attention_paths import paths
from depthscope.models import Block, BlockConfig, Encoder, FeedForward
from depthscope.models.wiring import Wired, Wiring, post_norm
from depthscope.progress import Share
from depthscope.theory import recomputed_paths
from depthscope_lab.papers.dong2021.tasks import Data, Size
from depthscope_lab.papers.trained import steps


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
        of_points = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.enter = nn.Linear(width, width) if vocabulary else of_points
        self.norm = nn.LayerNorm(width)
        ffn, placement = partial(FeedForward, activation=nn.GELU), post_norm if shape.ffn else attention_alone
        config = BlockConfig(width, shape.heads, ffn_width=width, ffn=ffn, placement=placement)
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
        return list(self.encoder.blocks)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recipe:
    """One of the paper's three trainings: data, network, optimiser."""

    size: Size
    shape: Shape
    epochs: int
    batch: int
    rate: float
    paper_rate: float
    decay: float = 0.0  # of weights, Adam's
    clip: float | None = None  # largest norm of the gradient


def train(recipe: Recipe, data: Data, seed: int, progress: Share = lambda _share: None) -> Network:
    """A trained network. Equal seeds give equal weights and an equal order."""
    form = {"classes": data.classes, "vocabulary": data.vocabulary, "tokens": recipe.size.tokens}
    network = Network(recipe.shape, **form, generator=torch.Generator().manual_seed(seed))
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    per_epoch = -(-recipe.size.train // recipe.batch)
    total = recipe.epochs * per_epoch

    def loss_of(step: int) -> Tensor:
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch))
        chosen = order.split(recipe.batch)[place]
        return F.cross_entropy(network(data.train.inputs[chosen]).flatten(0, 1), data.train.labels[chosen].flatten())

    for step, _loss in steps(loss_of, optimiser, total, clip=recipe.clip):
        progress((step + 1) / total)
    return network.eval()


@torch.no_grad()
def frozen_terms(network: Network, inputs: Tensor) -> Tensor:
    """The sum of all paths of each length 0, …, L, and last the constant part: (L + 2, batch, n, d)."""
    terms = paths(network.encoder, network.embed(inputs), keep_terms=True).terms
    assert terms is not None
    return terms


def plain_norm(x: Tensor) -> Tensor:
    """LayerNorm without learnt weights: what the authors put behind each head of a path and behind the sum."""
    return F.layer_norm(x, x.shape[-1:])


def alone(block: Block, head: int, x: Tensor) -> Tensor:
    """What one head (from 1) makes of a path's own tokens in the authors' evaluation: no skip, and a norm of its own.

    plain_norm(P_h(x)(xW_V,h + b_V,h)W_O,h + b_O), and the block's FFN with its skip and norm, if there is one.
    """
    attention = block.attention
    own = slice((head - 1) * (size := x.shape[-1] // attention.heads), head * size)
    assert isinstance(attention.output, nn.Linear)
    q, k, v = (
        F.linear(x, project.weight[own], project.bias[own])
        for project in (attention.query, attention.key, attention.value)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, scale=attention.scale)
    y = plain_norm(F.linear(mixed, attention.output.weight[:, own], attention.output.bias))
    return y if isinstance(block.ffn, nn.Identity) else block.norm2(y + block.ffn(y))


def _steps(network: Network) -> list[list[Callable[[Tensor], Tensor]]]:
    return [[partial(alone, block, head + 1) for head in range(network.shape.heads)] for block in network.blocks]


@torch.no_grad()
def recomputed_sums(network: Network, inputs: Tensor) -> Tensor:
    """The sum over *all* paths of each length of what leaves a path, attention recomputed: (L + 1, batch, n, d)."""
    x = network.embed(inputs)
    sums = torch.zeros(network.shape.depth + 1, *x.shape, dtype=x.dtype)
    for path, tokens in recomputed_paths(x, _steps(network)):
        sums[sum(head > 0 for head in path)] += tokens
    return sums


@torch.no_grad()
def sampled_sum(network: Network, inputs: Tensor, length: int, paths: int, generator: torch.Generator) -> Tensor:
    """The same over a few paths drawn with replacement, as the authors draw them: (batch, n, d)."""
    start, steps, depth = network.embed(inputs), _steps(network), network.shape.depth
    total = torch.zeros_like(start)
    for _ in range(paths):
        x = start
        for layer in torch.randperm(depth, generator=generator)[:length].sort().values.tolist():
            x = steps[layer][int(torch.randint(network.shape.heads, (), generator=generator))](x)
        total += x
    return total


# Which of the frozen terms are given to the readout, of (length, length asked about); and whether the constant part is.
READINGS: dict[str, tuple[Callable[[int, int], bool], bool]] = {
    "alone": (operator.eq, False),
    "with constant": (operator.eq, True),
    "up to": (operator.le, True),
}


def read(terms: Tensor, reading: str, asked: int) -> Tensor:
    """The part of the frozen terms (L + 2, …) that a reading gives to the readout: (batch, n, d)."""
    keeps, constant = READINGS[reading]
    return terms[torch.tensor([*(keeps(length, asked) for length in range(len(terms) - 1)), constant])].sum(dim=0)


def projection_shares(terms: Tensor) -> Tensor:
    """⟨A_k, X⟩/⟨X, X⟩ over all entries, X = Σ_k A_k: what each term adds to the whole, in its direction; the sum is 1.

    A share may be negative (a term that works against the whole) or above 1. Without any X, nan.
    """
    whole = terms.sum(dim=0)
    return (terms * whole).flatten(1).sum(dim=1) / whole.square().sum()


def accuracy(scores: Tensor, labels: Tensor) -> Tensor:
    """The share of tokens that are labelled rightly, of every sequence: (batch)."""
    return (scores.argmax(dim=-1) == labels).double().mean(dim=-1)


def in_parts(make: Callable[[Tensor], Tensor], inputs: Tensor, size: int) -> Tensor:
    """`make` of some sequences at a time, joined along its second axis: the first is for lengths."""
    return torch.cat([make(part) for part in inputs.split(size)], dim=1)
