"""The trainings of depth-phase: every (α, τ) at several learning rates, many models at once, kept in a folder.

All models have the same weights when they are new (Xavier's attention, He's FFN: `GAINS`), see the same images in the
same order, and differ in α, τ and the rate. The last fifth of the training images is not trained on; the loss on it
chooses each cell's rate.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import BlockConfig, VisionTransformer
from depthscope.models.initialisers import HE, XAVIER, Scheme, draw_block
from depthscope.probing.roles import CAN_LEARN
from depthscope.progress import Share
from depthscope_lab.papers.deep.phase_model import QKV, Stack, scores_of, stacked
from depthscope_lab.papers.study import Work
from depthscope_lab.papers.trained import steps
from depthscope_lab.training.data import LabelledImages, load_digits
from depthscope_lab.training.data.order import batch_indices
from depthscope_lab.training.kept import kept

Wiring = Literal["post", "pre"]
Row = dict[str, Any]
LAST = 10  # steps whose mean loss counts
PATCH = 4  # pixels: four patches and the class token
_DECAY = 0.1  # of weights, as in the recipes


@dataclass(frozen=True)
class Shape:
    """What all models of a map share. The cells are all pairs of `alphas` and `taus`."""

    depth: int
    alphas: tuple[float, ...]
    taus: tuple[float, ...]
    rates: tuple[float, ...]
    steps: int = 60
    batch: int = 32
    width: int = 32
    heads: int = 2
    seed: int = 0


def build(shape: Shape, wiring: Wiring) -> VisionTransformer:
    """The plain model, without α and τ. Its class token is as large as its patches, and not 50 times smaller."""
    generator = torch.Generator().manual_seed(shape.seed)
    block = BlockConfig(shape.width, shape.heads, 2 * shape.width, placement=wiring, initialise=_xavier_he)
    model = VisionTransformer(shape.depth, block, image_size=8, patch_size=PATCH, channels=1, generator=generator)
    assert model.class_token is not None
    nn.init.normal_(model.class_token, generator=generator)
    return model


def _xavier_he(attention: Any, ffn: Any, generator: torch.Generator | None = None) -> None:
    draw_block(Scheme(XAVIER, XAVIER, XAVIER, HE), attention, ffn, generator)


@cache
def digits() -> LabelledImages:
    """Training images, and in place of the test images those that choose the rate."""
    return load_digits().for_tuning()


def pixels(images: Tensor) -> Tensor:
    """Bytes → numbers of mean 0 and variance 1."""
    data = digits()
    return (images.float() / data.white - data.mean[0]) / data.std[0]


def train(shape: Shape, wiring: Wiring, tau: float, rate: float, told: Share) -> list[Row]:
    """One row per α: the losses of all steps, and loss and accuracy on the images that were held back.

    A number that is not finite says that the cell has failed.
    """
    stack = stacked(build(shape, wiring), list(shape.alphas), [tau] * len(shape.alphas))
    optimiser = torch.optim.AdamW(stack.parameters, lr=rate, weight_decay=_DECAY, fused=True)
    data = digits()
    losses: list[Tensor] = []
    attention: list[Row] = []

    def loss_of(step: int) -> Tensor:
        chosen = batch_indices(shape.seed, step, len(data.train_images), shape.batch)
        by_cell = _losses(stack, data.train_images[chosen], data.train_labels[chosen]).mean(dim=1)
        losses.append(by_cell.detach())
        return by_cell.sum()

    for step, _loss in steps(loss_of, optimiser, shape.steps):
        attention = attention or _attention_gradient(stack)  # of the first step
        told((step + 1) / shape.steps)
    found = _held_back(stack)
    return [
        {"alpha": alpha, "tau": tau, "rate": rate, "losses": run, **attention[cell], **found[cell]}
        for cell, (alpha, run) in enumerate(zip(shape.alphas, torch.stack(losses, dim=1).tolist(), strict=True))
    ]


def _losses(stack: Stack, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every model and image, (K, B)."""
    scores = scores_of(stack, pixels(images))
    return F.cross_entropy(scores.flatten(0, 1), labels.repeat(len(scores)), reduction="none").unflatten(
        0, (-1, len(labels))
    )


def _attention_gradient(stack: Stack) -> list[Row]:
    """‖∂W_Q,K‖/‖∂W_V,O‖ of a new model: its median over blocks, and the share of blocks whose attention can learn."""
    joint, output = (stack.blocks[f"{name}.weight"].grad for name in (QKV, "attention.output"))
    assert joint is not None
    assert output is not None
    width = output.shape[-1]
    of_scores = joint[:, :, : 2 * width].double().flatten(2).norm(dim=-1)  # (L, K)
    of_values = torch.hypot(
        joint[:, :, 2 * width :].double().flatten(2).norm(dim=-1), output.double().flatten(2).norm(dim=-1)
    )
    ratio = of_scores / of_values
    return [{"ratio": own.median().item(), "can_learn": (own >= CAN_LEARN).double().mean().item()} for own in ratio.T]


@torch.no_grad()
def _held_back(stack: Stack) -> list[Row]:
    data = digits()
    loss, right = torch.zeros_like(stack.alpha), torch.zeros_like(stack.alpha)
    for images, labels in zip(data.test_images.split(64), data.test_labels.split(64), strict=True):
        scores = scores_of(stack, pixels(images))  # (K, B, classes)
        loss = loss - scores.log_softmax(dim=-1)[:, torch.arange(len(labels)), labels].sum(dim=1)
        right = right + (scores.argmax(dim=-1) == labels).sum(dim=1)
    count = len(data.test_labels)
    return [
        {"valid_loss": one / count, "valid_accuracy": hits / count}
        for one, hits in zip(loss.tolist(), right.tolist(), strict=True)
    ]


def trained(shape: Shape, wiring: Wiring, folder: Path, work: Work) -> list[Row]:
    """Every cell at its best rate."""
    cells: dict[tuple[float, float], list[Row]] = {}
    same = {name: value for name, value in asdict(shape).items() if name not in ("taus", "rates")}
    for tau, rate in product(shape.taus, shape.rates):
        told = work.part(shape.steps * shape.depth * len(shape.alphas))
        key = {"run": "training", "wiring": wiring, "tau": tau, "rate": rate, **same}
        for row in kept(folder, key, partial(train, shape, wiring, tau, rate, told)):
            cells.setdefault((row["alpha"], row["tau"]), []).append(row)
        told(1.0)
    return [chosen_rate(found) for found in cells.values()]


def chosen_rate(rows: list[Row]) -> Row:
    """Of one cell's runs, that with the least loss on the images held back; the least rate where all have failed.

    `loss` is the mean over the last steps; infinite where a number was not finite.
    """
    ordered = sorted(rows, key=lambda row: row["rate"])
    best = min(ordered, key=lambda row: math.inf if row["valid_loss"] is None else row["valid_loss"])
    end = best["losses"][-LAST:]
    failed = any(loss is None for loss in best["losses"]) or best["valid_loss"] is None
    about = {name: best[name] for name in best if name != "losses"}
    edges = (ordered[0]["rate"], ordered[-1]["rate"])
    return about | {"loss": math.inf if failed else sum(end) / len(end), "edge": best["rate"] in edges}
