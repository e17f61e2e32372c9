"""The trainings of `depth-1000`: one model of very many blocks at a time, each kept as a file as soon as it is done.

All are the ViT of the recipe `vit-digits`, narrow, with one change: the head reads all tokens side by side instead of a
class token, which at 60 blocks learns next to nothing in as few steps, in every variant tried. AdamW with weight decay
0.1, no warm-up, no clipping, the rate × 0.2 at 70 % and at 90 % of the steps. A run that chooses a rate has seed 0, is
trained on four fifths of the training images and judged on the rest; a run that counts has a fresh seed, is trained on
all training images and judged on the test images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.measures import token_similarity
from depthscope.models import Block, BlockConfig, VisionTransformer
from depthscope.progress import Share
from depthscope_lab.papers.deep.variants import prescription, wiring_for
from depthscope_lab.papers.trained import loss_of_task, means_of_task, steps
from depthscope_lab.training.config import ImageConfig
from depthscope_lab.training.data import load_digits
from depthscope_lab.training.images import ImageClassification
from depthscope_lab.training.kept import kept
from depthscope_lab.training.optimiser import QuickAdamW
from depthscope_lab.training.randomness import derived_generator, derived_seed, seeded
from depthscope_lab.training.recipes import RECIPES
from depthscope_lab.training.schedule import learning_rate

GROUPS = 50  # runs of neighbouring blocks: what is kept by block is kept by run, and a run is left out at once
LOOKS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the steps, at which a run that counts is looked at
LEARNED = 0.9  # a model whose loss is above this share of ln 10 has learned nothing that leaving blocks out could cost
CHANCE = math.log(10)


@dataclass(frozen=True)
class Shape:
    """What is the same for all runs of the study."""

    width: int = 32
    ffn_width: int = 64
    heads: int = 4
    patch_size: int = 2
    batch: int = 16
    steps: int = 40
    left_out_on: int = 32  # test images on which runs of blocks are left out

    @property
    def tokens(self) -> int:
        """Patches of an image of 8 × 8."""
        return (8 // self.patch_size) ** 2


@dataclass(frozen=True)
class Run:
    """One training. `counts`: judged on the test images and looked at; else it helps to choose a rate."""

    variant: str
    depth: int
    rate: float
    seed: int
    counts: bool


def found_or_trained(run: Run, shape: Shape, folder: Path, told: Share) -> dict[str, Any]:
    """What came of a run: read if it is kept in the folder, else trained."""
    return kept(folder, {"run": asdict(run), "shape": asdict(shape)}, lambda: trained(run, shape, told))  # type: ignore[no-any-return]


def trained(run: Run, shape: Shape, told: Share) -> dict[str, Any]:
    """Losses by step, loss and accuracy at the end; and, if the run counts, looks and `without`."""
    config = _config(run, shape)
    task = ImageClassification(config, load_digits())
    model = build(run.variant, task)
    optimiser = QuickAdamW(model.parameters(), run.rate, (config.beta1, config.beta2), config.weight_decay)
    look_at = {round(share * (shape.steps - 1)) for share in LOOKS} if run.counts else set()
    losses: list[float] = []
    looks: list[dict[str, Any]] = []
    heard: list[float] = []

    def loss_of(step: int) -> Tensor:
        nonlocal heard
        with listening(model, step in look_at) as heard:
            return loss_of_task(task, model, step)

    rate = partial(learning_rate, config, total=shape.steps)
    for step, loss in steps(loss_of, optimiser, shape.steps, rate=rate):
        if step in look_at:
            looks.append({"step": step, "similarity": grouped(heard), "roles": grouped(roles(model))})
        losses.append(loss)
        if not math.isfinite(loss):
            break
        told((step + 1) / shape.steps)
    loss, accuracy = means_of_task(task, model).values()
    learned = run.counts and loss <= LEARNED * CHANCE
    without = losses_without(model, task, shape.left_out_on) if learned else None
    about = {"run": asdict(run), "losses": losses, "loss": loss, "accuracy": accuracy}
    return {**about, "looks": looks, "without": without}


def _config(run: Run, shape: Shape) -> ImageConfig:
    return RECIPES["vit-digits"]("post").changed(  # type: ignore[no-any-return]
        depth=run.depth,
        width=shape.width,
        ffn_width=shape.ffn_width,
        heads=shape.heads,
        patch_size=shape.patch_size,
        batch_size=shape.batch,
        steps=shape.steps,
        lr=run.rate,
        seed=run.seed,
        evaluate_on="test" if run.counts else "validation",
    )


class SideBySide(nn.Module):
    """Patches, positions, blocks, a linear head on all tokens: images (batch, c, s, s) → scores (batch, classes)."""

    def __init__(self, vit: VisionTransformer, generator: torch.Generator):
        super().__init__()
        self.embed, self.positions, self.encoder = vit.embed, vit.positions, vit.encoder
        _, n, d = vit.positions.shape
        self.head = nn.Linear(n * d, vit.head.out_features)
        nn.init.normal_(self.head.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(-2).mT + self.positions  # (batch, n, d)
        return self.head(self.encoder(x).flatten(1))  # type: ignore[no-any-return]


def build(variant: str, task: ImageClassification) -> SideBySide:
    """The model in the wiring of a variant, drawn from the seed."""
    config, (_, channels, _, size) = task.config, task.data.train_images.shape
    found = prescription(config.depth, config.width, config.ffn_width, (size // config.patch_size) ** 2)
    block = BlockConfig(config.width, config.heads, config.ffn_width, placement=wiring_for(variant, found))
    with seeded(derived_seed(config.seed, "build")):  # modules draw their first weights from the global state
        vit = VisionTransformer(
            config.depth,
            block,
            image_size=size,
            patch_size=config.patch_size,
            channels=channels,
            classes=task.data.classes,
            pool="mean",  # no class token
            generator=derived_generator(config.seed, "weights"),
        )
        return SideBySide(vit, derived_generator(config.seed, "head"))


@contextmanager
def listening(model: SideBySide, on: bool) -> Iterator[list[float]]:
    """t_sim behind each block's FFN (before the last norm and de-escalation) in the passes inside, mean over images."""
    heard: list[float] = []

    def hear(_module: nn.Module, _given: Any, tokens: Tensor) -> None:
        heard.append(token_similarity(tokens.detach()).mean().item())

    blocks = blocks_of(model) if on else []
    handles = [block.stations["after_ffn"].register_forward_hook(hear) for block in blocks]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()


def roles(model: SideBySide) -> list[float]:
    """‖∂W_Q, ∂W_K‖ over ‖∂W_V, ∂W_O‖ of each block: below 1 % attention cannot learn what to attend to."""
    found = []
    for block in blocks_of(model):
        part: Any = block.attention
        q, k, v, o = (_energy(layer.weight.grad) for layer in (part.query, part.key, part.value, part.output))
        found.append(math.sqrt((q + k) / (v + o)) if v + o > 0 else math.nan)
    return found


def _energy(gradient: Tensor) -> float:
    return gradient.square().sum().item()


def blocks_of(model: SideBySide) -> list[Block]:
    return list(model.encoder.blocks)  # type: ignore[arg-type]


def groups_of(depth: int) -> list[range]:
    """The blocks, counted from 0, in at most `GROUPS` runs of equal length; the last may be shorter."""
    size = -(-depth // GROUPS)
    return [range(first, min(first + size, depth)) for first in range(0, depth, size)]


def grouped(values: list[float]) -> list[float]:
    """The mean of each group of blocks."""
    return [sum(values[i] for i in group) / len(group) for group in groups_of(len(values))]


@torch.no_grad()
def losses_without(model: SideBySide, task: ImageClassification, count: int) -> dict[str, Any]:
    """The test loss of `count` images with all blocks, and without each group of blocks; of a model in eval mode."""
    images, labels = task.normalised(task.data.test_images[:count]), task.data.test_labels[:count]
    loss: Callable[[], float] = lambda: nn.functional.cross_entropy(model(images).double(), labels).item()  # noqa: E731
    blocks, found = blocks_of(model), []
    for group in groups_of(len(blocks)):
        with skipping(blocks[group.start : group.stop]):
            found.append(loss())
    return {"whole": loss(), "losses": found}


@contextmanager
def skipping(blocks: list[Block]) -> Iterator[None]:
    """Inside, these blocks hand on what they are given."""
    for block in blocks:
        block.forward = _hand_on  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _hand_on(x: Tensor, mask: Tensor | None = None) -> Tensor:
    return x
