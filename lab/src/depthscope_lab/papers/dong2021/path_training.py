"""Training for the study of paths: Adam, an order that follows from (seed, epoch), and checkpoints to go on from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from depthscope.progress import Share
from depthscope_lab.papers.dong2021.path_model import Network, Shape
from depthscope_lab.papers.dong2021.tasks import Data, Size
from depthscope_lab.training.checkpoint import read_newest, remove_surplus, write_checkpoint
from depthscope_lab.training.state import model_tensors, optimizer_tensors, restore_model, restore_optimizer

Row = dict[str, Any]
CHECKPOINTS = 5  # per training


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
    folder: Path,
    *,
    observed: tuple[int, ...] = (),
    observe: Callable[[Network], list[Row]] = lambda _network: [],
    progress: Share = lambda _share: None,
) -> tuple[Network, list[Row]]:
    """A trained network, and what was observed after these numbers of steps, each row with its step and loss.

    What an earlier process left in the folder is gone on from. Equal seeds give equal weights and an equal order.
    """
    network = build(recipe, data, seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=rate, weight_decay=recipe.decay)
    rows: list[Row] = []
    first = 0  # epoch
    if (earlier := read_newest(folder, lambda _damaged: None)) is not None:
        restore_model(network, earlier.files["model"], {})
        restore_optimizer(optimiser, earlier.files["optimizer"], earlier.record["optimizer"])
        first, rows = earlier.record["epoch"], earlier.record["rows"]
        remove_surplus(earlier.path, keep=1, spared=())
    else:
        rows = _look(observe, network, 0, None) if 0 in observed else []
    per_epoch = recipe.steps(1)
    for epoch in range(first, recipe.epochs):
        order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + epoch))
        for place, chosen in enumerate(order.split(recipe.batch), start=1):
            loss = F.cross_entropy(
                network(data.train.inputs[chosen]).flatten(0, 1), data.train.labels[chosen].flatten()
            )
            optimiser.zero_grad()
            loss.backward()
            if recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(network.parameters(), recipe.clip)
            optimiser.step()
            if (step := epoch * per_epoch + place) in observed:
                rows += _look(observe, network, step, loss.item())
            progress(step / recipe.steps())
        if (epoch + 1) % max(1, recipe.epochs // CHECKPOINTS) == 0 or epoch + 1 == recipe.epochs:
            tensors, rest = optimizer_tensors(optimiser)
            write_checkpoint(
                folder,
                (epoch + 1) * per_epoch,
                {"model": model_tensors(network)[0], "optimizer": tensors},
                {"epoch": epoch + 1, "rows": rows, "optimizer": rest},
                keep=1,
            )
    return network.eval(), rows


def _look(observe: Callable[[Network], list[Row]], network: Network, step: int, loss: float | None) -> list[Row]:
    return [row | {"step": step, "loss": loss} for row in observe(network)]
