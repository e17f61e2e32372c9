"""Training for the study of paths: Adam, and an order that follows from (seed, epoch)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.progress import Share
from depthscope_lab.papers.dong2021.path_model import Network, Shape
from depthscope_lab.papers.dong2021.tasks import Data, Size
from depthscope_lab.papers.trained import steps

Row = dict[str, Any]


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

    def steps(self, epochs: int | None = None) -> int:
        """Of so many epochs, or of all."""
        return (self.epochs if epochs is None else epochs) * -(-self.size.train // self.batch)


def build(recipe: Recipe, data: Data, seed: int) -> Network:
    """The network before its first step."""
    return Network(
        recipe.shape,
        classes=data.classes,
        vocabulary=data.vocabulary,
        tokens=recipe.size.tokens,
        generator=torch.Generator().manual_seed(seed),
    )


def train(
    recipe: Recipe,
    data: Data,
    rate: float,
    seed: int,
    *,
    observed: tuple[int, ...] = (),
    observe: Callable[[Network], list[Row]] = lambda _network: [],
    progress: Share = lambda _share: None,
) -> tuple[Network, list[Row]]:
    """A trained network, and what was observed after these numbers of steps, each row with its step.

    Equal seeds give equal weights and an equal order.
    """
    network = build(recipe, data, seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=rate, weight_decay=recipe.decay)
    per_epoch, total = recipe.steps(1), recipe.steps()

    def loss_of(step: int) -> Tensor:
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch))
        chosen = order.split(recipe.batch)[place]
        return F.cross_entropy(network(data.train.inputs[chosen]).flatten(0, 1), data.train.labels[chosen].flatten())

    found = [row | {"step": 0} for row in observe(network)] if 0 in observed else []
    for step, _loss in steps(loss_of, optimiser, total, clip=recipe.clip):
        if step + 1 in observed:
            found += [row | {"step": step + 1} for row in observe(network)]
        progress((step + 1) / total)
    return network.eval(), found
