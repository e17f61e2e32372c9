"""The trainings of `depth-1000`: narrow Vision Transformers of very many blocks, each kept as soon as it is done."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from depthscope.measures import token_similarity
from depthscope.models import Block, BlockConfig, VisionTransformer
from depthscope.models.wiring import WIRINGS, Wiring
from depthscope.progress import Share
from depthscope.remedies import deescalate
from depthscope.theory import Gains, Prescription, prescribe
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


CHANCE = math.log(10)


LEARNED = 0.9  # a model whose loss is above this share of ln 10 has learned nothing that leaving blocks out could cost


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

    def prescription(self, depth: int) -> Prescription:
        """α and τ for this depth, from the theory alone: weights as `nn.Linear` draws them, images of 8 × 8."""
        return prescribe(depth, Gains.of_linear(self.width, self.ffn_width, (8 // self.patch_size) ** 2))


@dataclass(frozen=True)
class Run:
    """One training. `counts`: judged on the test images and looked at; else it helps to choose a rate."""

    variant: str
    depth: int
    rate: float
    seed: int
    counts: bool


def wiring_for(variant: str, found: Prescription) -> Wiring:
    """One of `WIRINGS`, or post-norm with the prescription's α, τ or both."""
    if variant in WIRINGS:
        return WIRINGS[variant]
    alpha = found.alpha if variant in ("prescribed", "alpha") else 1.0
    return weighted_post_norm(alpha, found.tau if variant in ("prescribed", "tau") else 0.0)


def same_as(variant: str, found: Prescription) -> str:
    """The variant itself, or the one that it cannot be told from: where α = 1 is prescribed, τ alone is all of it."""
    return {"alpha": "post", "tau": "prescribed"}.get(variant, variant) if found.alpha == 1 else variant


def weighted_post_norm(alpha: float, tau: float) -> Wiring:
    """Post-norm with both branches times α and de-escalation τ at the end, as `ResidualWeight` and `DeEscalate` do."""

    def run(block: Any, x: Tensor, given: Any) -> Tensor:
        at = block.stations
        x = at["input"](x)
        y = block.norm1(at["after_attention"](x + at["attention_branch"](alpha * block.attend(x, given))))
        y = block.enter_ffn(y, given)
        y = block.norm2(at["after_ffn"](y + at["ffn_branch"](alpha * block.ffn(y))))
        return at["output"](deescalate(y, tau))

    return Wiring(f"post, α = {alpha:.4g}, τ = {tau:.4g}", run, final_norm=False, placement="post")


def found_or_trained(run: Run, shape: Shape, folder: Path, told: Share) -> dict[str, Any]:
    """What came of a run: read if it is kept in the folder, else trained."""
    return kept(folder, {"run": asdict(run), "shape": asdict(shape)}, lambda: trained(run, shape, told))  # type: ignore[no-any-return]


def trained(run: Run, shape: Shape, told: Share) -> dict[str, Any]:
    """Losses by step, loss and accuracy at the end; if the run counts, looks, and (once it has learned) `without`."""
    config = settings(run, shape)
    task = ImageClassification(config, load_digits())
    model = build(run.variant, task, shape)
    optimiser = QuickAdamW(model.parameters(), run.rate, (config.beta1, config.beta2), config.weight_decay)
    look_at = {round(share * (shape.steps - 1)) for share in LOOKS} if run.counts else set()
    losses: list[float] = []
    looks: list[dict[str, Any]] = []
    heard: list[float] = []

    def loss_of(step: int) -> Tensor:
        nonlocal heard
        with listening(model, step in look_at) as heard:
            return loss_of_task(task, model, step)

    for step, loss in steps(loss_of, optimiser, shape.steps, rate=partial(learning_rate, config, total=shape.steps)):
        if step in look_at:
            looks.append(
                {"step": step, "t_sim": grouped(heard), "roles": grouped([*map(role_ratio, blocks_of(model))])}
            )
        losses.append(loss)
        if not math.isfinite(loss):
            break
        told((step + 1) / shape.steps)
    loss, accuracy = means_of_task(task, model).values()
    learned = run.counts and loss <= LEARNED * CHANCE
    without = losses_without(model, task, shape.left_out_on) if learned else None
    about = {"run": asdict(run), "losses": losses, "loss": loss, "accuracy": accuracy}
    return {**about, "looks": looks, "without": without}


def settings(run: Run, shape: Shape) -> ImageConfig:
    """The recipe `vit-digits` in this shape: no warm-up, no clipping, the rate × 0.2 at 70 % and at 90 %."""
    same = {name: getattr(shape, name) for name in ("width", "ffn_width", "heads", "patch_size", "steps")}
    held_out = "test" if run.counts else "validation"
    own = {"depth": run.depth, "lr": run.rate, "seed": run.seed, "batch_size": shape.batch, "evaluate_on": held_out}
    return RECIPES["vit-digits"]("post").changed(**same, **own)  # type: ignore[no-any-return]


class SideBySide(nn.Module):
    """Patches, positions, blocks, a linear head on all tokens: images (batch, c, s, s) → scores (batch, classes)."""

    def __init__(self, vit: VisionTransformer, generator: torch.Generator):
        super().__init__()
        self.embed, self.positions, self.encoder = vit.embed, vit.positions, vit.encoder
        self.head = nn.Linear(vit.positions[0].numel(), vit.head.out_features)
        nn.init.normal_(self.head.weight, std=0.02, generator=generator)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(-2).mT + self.positions  # (batch, n, d)
        return self.head(self.encoder(x).flatten(1))  # type: ignore[no-any-return]


def build(variant: str, task: ImageClassification, shape: Shape) -> SideBySide:
    """The model in the wiring of a variant, drawn from the seed."""
    config, (_, channels, _, size) = task.config, task.data.train_images.shape
    wiring = wiring_for(variant, shape.prescription(config.depth))
    block = BlockConfig(config.width, config.heads, config.ffn_width, placement=wiring)
    look: dict[str, Any] = {
        "image_size": size,
        "patch_size": config.patch_size,
        "channels": channels,
        "classes": task.data.classes,
    }
    with seeded(derived_seed(config.seed, "build")):  # modules draw their first weights from the global state
        weights = derived_generator(config.seed, "weights")
        vit = VisionTransformer(config.depth, block, pool="mean", generator=weights, **look)  # no class token
        return SideBySide(vit, derived_generator(config.seed, "head"))


@contextmanager
def listening(model: SideBySide, on: bool) -> Iterator[list[float]]:
    """t_sim after each block's FFN (before the last norm and de-escalation) in the passes inside, mean over images."""
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


def role_ratio(block: Block) -> float:
    """‖∂W_Q, ∂W_K‖ over ‖∂W_V, ∂W_O‖: below 1 % attention cannot learn what to attend to."""
    part: Any = block.attention
    layers = (part.query, part.key, part.value, part.output)
    q, k, v, o = (layer.weight.grad.square().sum().item() for layer in layers)
    return math.sqrt((q + k) / (v + o)) if v + o > 0 else math.nan


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
def losses_without(model: SideBySide, task: ImageClassification, count: int) -> tuple[float, list[float]]:
    """The test loss of `count` images with all blocks, and without each group of blocks; of a model in eval mode."""
    images, labels = task.normalised(task.data.test_images[:count]), task.data.test_labels[:count]

    def loss() -> float:
        return nn.functional.cross_entropy(model(images).double(), labels).item()

    blocks, found = blocks_of(model), []
    for group in groups_of(len(blocks)):
        with skipping(blocks[group.start : group.stop]):
            found.append(loss())
    return loss(), found


@contextmanager
def skipping(blocks: list[Block]) -> Iterator[None]:
    """Inside, these blocks hand on what they are given."""
    for block in blocks:
        block.forward = lambda x, mask=None: x  # type: ignore[method-assign, assignment, misc]
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
