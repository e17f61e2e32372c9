"""Recipes: functions that return a training configuration. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from depthscope.training.config import ImageConfig, TrainingConfig, Variant


def vit_cifar10(variant: Variant) -> ImageConfig:
    """Yu & Zhang 2024, §3.3 and Table 1: a ViT of 80 blocks on CIFAR-10, 150 epochs; needs a GPU.

    The paper names neither warm-up, dropout, gradient clipping nor random crops and flips: there are none.
    "Auto-augmentation" is AutoAugment's policy for CIFAR-10 (the paper's reference is RandAugment's).
    The FFN is Algorithm 1's (ReLU), the weights PyTorch's default. The last, incomplete batch of an
    epoch is left out.
    """
    return ImageConfig(
        recipe="vit-cifar10",
        variant=variant,
        dataset="cifar10",
        depth=80,
        width=192,
        ffn_width=384,
        heads=8,
        patch_size=4,
        batch_size=128,
        lr={"post": 0.5e-4, "pre": 1e-4, "deescalated": 1e-4}[variant],
        epochs=150,
        weight_decay=0.1,
        augment=True,
    )


def vit_digits(variant: Variant) -> ImageConfig:
    """The same experiment in minutes on two cores: scikit-learn's 8 × 8 digits, 48 blocks of width 64.

    The learning rates are starting points, not the result of a search: pre-norm's is larger than the others'.
    """
    return ImageConfig(
        recipe="vit-digits",
        variant=variant,
        dataset="digits",
        depth=48,
        width=64,
        ffn_width=128,
        heads=4,
        patch_size=2,
        batch_size=64,
        lr={"post": 0.5e-4, "pre": 1e-3, "deescalated": 1e-4}[variant],
        epochs=15,
        weight_decay=0.1,
    )


@dataclass(frozen=True)
class Entry:
    """A recipe as the command line lists it."""

    recipe: Callable[[Variant], TrainingConfig]
    config: type[TrainingConfig]
    title: str
    cost: str


RECIPES = {
    "vit-digits": Entry(vit_digits, ImageConfig, "ViT, 48 blocks, on scikit-learn's digits", "minutes on 2 cores"),
    "vit-cifar10": Entry(vit_cifar10, ImageConfig, "ViT, 80 blocks, on CIFAR-10 (Yu & Zhang 2024, Fig. 6)", "a GPU"),
}
