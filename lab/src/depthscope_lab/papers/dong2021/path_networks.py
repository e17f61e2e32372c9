"""The three tasks of Dong et al. 2021, Fig. 4, the networks that learn them, and both ways to take one apart by paths.

*Frozen*: attention, the scales of the norms and the gates of the FFN stay as they are in the whole network. All is
linear then, and the sums over all paths of each length are the terms of Thm 2.1: with the constant part that the biases
make they add up to what leaves the last block (`frozen_terms`).

*Recomputed*: what the authors' code evaluates. Every path is a network of its own, which computes its attention and its
norms from its own tokens (`recomputed_sums`); these are no terms of anything.

Every token has a label of its own. Memorising is tested on what was learnt, as its name says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.attention_paths import paths
from depthscope.models import Block, BlockConfig, Encoder, FeedForward
from depthscope.models.wiring import Wired, Wiring, post_norm
from depthscope.progress import Share
from depthscope.theory import recomputed_paths
from depthscope_lab.papers.trained import steps
from depthscope_lab.training.data.wikitext import load_manual

SPREAD = 3.3  # standard deviation of the shift of a whole set of points, as in the authors' generator
SIDE = 10.0  # of the square that the points are drawn from
BINS = 24  # per coordinate, for what a point's own place says


@dataclass(frozen=True)
class Recipe:
    """One of the paper's three trainings: numbers of sequences, tokens in each, network, optimiser."""

    train: int
    validation: int  # what a learning rate was chosen on
    test: int
    tokens: int
    depth: int
    heads: int
    width: int
    epochs: int
    batch: int
    rate: float
    paper_rate: float
    classes: int = 2  # of sorting, the alphabet
    ffn: bool = False  # as wide as the tokens
    positions: bool = False
    decay: float = 0.0  # of weights, Adam's
    clip: float | None = None  # largest norm of the gradient


class Examples(NamedTuple):
    """inputs (count, n) of ids or (count, n, 2) of coordinates, labels (count, n)."""

    inputs: Tensor
    labels: Tensor


class Data(NamedTuple):
    train: Examples
    test: Examples
    vocabulary: int = 0  # 0: points, not ids


def _drawn(recipe: Recipe, make: Callable[[int], Examples], vocabulary: int = 0) -> Data:
    train, _validation, test = map(make, (recipe.train, recipe.validation, recipe.test))
    return Data(train, test, vocabulary)


def sorting(recipe: Recipe, seed: int) -> Data:
    """Uniform letters with repetition; the label at place i is the i-th of the sorted sequence."""
    generator = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        letters = torch.randint(recipe.classes, (count, recipe.tokens), generator=generator)
        return Examples(letters, letters.sort(dim=-1).values)

    return _drawn(recipe, examples, recipe.classes)


def convex_hull(recipe: Recipe, seed: int) -> Data:
    """Uniform points in a square, shifted together by a Gaussian; the label says which are on their convex hull."""
    generator = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        points = SIDE * torch.rand(count, recipe.tokens, 2, generator=generator, dtype=torch.float64)
        points = points + SPREAD * torch.randn(count, 1, 2, generator=generator, dtype=torch.float64)
        return Examples(points.float(), on_hull(points).long())

    return _drawn(recipe, examples)


def on_hull(points: Tensor) -> Tensor:
    """Which of the points (…, n, 2), n ≥ 3, are corners of their convex hull: (…, n), boolean.

    A point is one if all others lie within an angle of less than π, seen from it: if the largest gap between their
    directions, one after the other around it, is more than π.
    """
    n = points.shape[-2]
    ways = points.unsqueeze(-3) - points.unsqueeze(-2)  # (…, i, j, 2): from i to j
    others = ~torch.eye(n, dtype=torch.bool)
    angles = torch.atan2(ways[..., 1], ways[..., 0])[..., others].unflatten(-1, (n, n - 1)).sort(dim=-1).values
    around = torch.cat([angles, angles[..., :1] + 2 * math.pi], dim=-1)
    return around.diff(dim=-1).amax(dim=-1) > math.pi


def memorisation(recipe: Recipe, seed: int) -> Data:
    """Consecutive pieces of Python's manual, and for every word of every piece a random bit to be remembered."""
    words, shape = load_manual(), (recipe.train, recipe.tokens)
    stream = torch.from_numpy(words.train[: math.prod(shape)].astype("int64"))
    if len(stream) < math.prod(shape):
        raise ValueError(f"expected {recipe.train} × {recipe.tokens} words in Python's manual, got {len(stream)}")
    labels = torch.randint(2, shape, generator=torch.Generator().manual_seed(seed))
    whole = Examples(stream.unflatten(0, shape), labels)
    return Data(whole, Examples(*(part[: recipe.test] for part in whole)), len(words.vocabulary))


TASKS: dict[str, Callable[[Recipe, int], Data]] = {
    "sorting": sorting,
    "convex hull": convex_hull,
    "memorisation": memorisation,
}


def without_attention(task: str, data: Data) -> float:
    """Accuracy on the test set of a table, learnt from the training set, of what a token knows of itself.

    That is its letter and place, its bin in the plane, or its word; no path of length 0 can be expected to do better.
    """

    def own(x: Tensor) -> Tensor:
        """As one number (count, n)."""
        if task == "sorting":
            return x * x.shape[1] + torch.arange(x.shape[1])
        if task == "convex hull":
            low, high = -3 * SPREAD, SIDE + 3 * SPREAD
            return ((x - low) / (high - low) * BINS).long().clamp(0, BINS - 1) @ torch.tensor([BINS, 1])
        return x

    (seen, labels), (asked, wanted) = data.train, data.test
    return table_accuracy(own(seen), labels, own(asked), wanted)


def table_accuracy(keys: Tensor, labels: Tensor, test_keys: Tensor, test_labels: Tensor) -> float:
    """Of a table that answers with the commonest label of a key, and of all where a key is new."""
    seen = pd.Series(labels.flatten().numpy())
    answers = seen.groupby(keys.flatten().numpy()).agg(lambda own: own.mode()[0])
    found = answers.reindex(test_keys.flatten().numpy()).fillna(seen.mode()[0])
    return float((found.to_numpy() == test_labels.flatten().numpy()).mean())


def run_attention_alone(block: Wired, x: Tensor, given: Any) -> Tensor:
    """Norm(X + attention): a post-norm block without an FFN."""
    at = block.stations
    x = at["input"](x)
    y = at["after_attention"](x + block.alpha * at["attention_branch"](block.attend(x, given)))
    return at["output"](block.norm1(y))


def _without_ffn(block: Any) -> None:
    block.ffn, block.norm2 = nn.Identity(), nn.Identity()


attention_alone = Wiring("attention alone", run_attention_alone, final_norm=False, prepare=_without_ffn)


class Network(nn.Module):
    """Inputs (batch, n) of ids or (batch, n, 2) of points → scores (batch, n, classes) of every token.

    As the authors': ids (and places, if asked for) are embedded, go through a linear map and a LayerNorm; points go
    through an FFN of two layers with GELU and a LayerNorm. There is no dropout, which the authors have.
    """

    def __init__(self, recipe: Recipe, vocabulary: int, generator: torch.Generator | None = None):
        super().__init__()
        width, self.heads = recipe.width, recipe.heads
        self.words = nn.Embedding(vocabulary, width) if vocabulary else None
        self.places = nn.Embedding(recipe.tokens, width) if recipe.positions else None
        of_points = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.enter = nn.Linear(width, width) if vocabulary else of_points
        self.norm = nn.LayerNorm(width)
        ffn, placement = partial(FeedForward, activation=nn.GELU), post_norm if recipe.ffn else attention_alone
        config = BlockConfig(width, recipe.heads, ffn_width=width, ffn=ffn, placement=placement)
        self.encoder = Encoder(recipe.depth, config, generator=generator)
        self.blocks: list[Block] = list(self.encoder.blocks)  # type: ignore[arg-type]
        self.head = nn.Linear(width, recipe.classes)
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


def train(recipe: Recipe, data: Data, seed: int, progress: Share = lambda _share: None) -> Network:
    """A trained network. Equal seeds give equal weights and an equal order."""
    network = Network(recipe, data.vocabulary, torch.Generator().manual_seed(seed))
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    per_epoch = -(-recipe.train // recipe.batch)
    total = recipe.epochs * per_epoch

    def loss_of(step: int) -> Tensor:
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(recipe.train, generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch))
        inputs, labels = (part[order.split(recipe.batch)[place]] for part in data.train)
        return F.cross_entropy(network(inputs).flatten(0, 1), labels.flatten())

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
    """LayerNorm without learnt weights: what the authors put after each head of a path and after the sum."""
    return F.layer_norm(x, x.shape[-1:])


def alone(block: Block, head: int, x: Tensor) -> Tensor:
    """What one head (from 0) makes of a path's own tokens in the authors' evaluation: no skip, and a norm of its own.

    plain_norm(P_h(x)(xW_V,h + b_V,h)W_O,h + b_O), and the block's FFN with its skip and norm, if there is one.
    """
    attention, size = block.attention, x.shape[-1] // block.attention.heads
    own = slice(head * size, (head + 1) * size)
    assert isinstance(attention.output, nn.Linear)
    q, k, v = (
        F.linear(x, project.weight[own], project.bias[own])
        for project in (attention.query, attention.key, attention.value)
    )
    mixed = F.scaled_dot_product_attention(q, k, v, scale=attention.scale)
    y = plain_norm(F.linear(mixed, attention.output.weight[:, own], attention.output.bias))
    return y if isinstance(block.ffn, nn.Identity) else block.norm2(y + block.ffn(y))


def _steps(network: Network) -> list[list[Callable[[Tensor], Tensor]]]:
    return [[partial(alone, block, head) for head in range(network.heads)] for block in network.blocks]


@torch.no_grad()
def recomputed_sums(network: Network, inputs: Tensor) -> Tensor:
    """The sum over *all* paths of each length of what leaves a path, attention recomputed: (L + 1, batch, n, d)."""
    x = network.embed(inputs)
    sums = torch.zeros(len(network.blocks) + 1, *x.shape, dtype=x.dtype)
    for path, tokens in recomputed_paths(x, _steps(network)):
        sums[sum(head > 0 for head in path)] += tokens
    return sums


@torch.no_grad()
def sampled_sum(network: Network, inputs: Tensor, length: int, paths: int, generator: torch.Generator) -> Tensor:
    """The same over a few paths drawn with replacement, as the authors draw them: (batch, n, d)."""
    start, steps = network.embed(inputs), _steps(network)
    total = torch.zeros_like(start)
    for _ in range(paths):
        x = start
        for layer in torch.randperm(len(steps), generator=generator)[:length].sort().values.tolist():
            x = steps[layer][int(torch.randint(network.heads, (), generator=generator))](x)
        total += x
    return total
