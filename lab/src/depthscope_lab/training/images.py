"""The task of classifying images with a Vision Transformer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthscope.models import VisionTransformer
from depthscope.remedies import apply
from depthscope_lab.training.config import ImageConfig
from depthscope_lab.training.data import LabelledImages
from depthscope_lab.training.data.augmentation import auto_augment
from depthscope_lab.training.data.order import batch_indices
from depthscope_lab.training.randomness import derived_generator
from depthscope_lab.training.task import Carry, Share, block_of, remedies_of

ImageBatch = tuple[Tensor, Tensor]  # normalised images (batch, channels, s, s), classes (batch,)
_TEST_BATCH = 256


def build_vit(config: ImageConfig, *, image_size: int, channels: int, classes: int = 10) -> VisionTransformer:
    """The model of a configuration, in its variant, drawn from its seed. Works on the meta device.

    It reads a class token: after complete de-escalation the mean over the tokens is zero for every image.
    """
    model = VisionTransformer(
        config.depth,
        block_of(config),
        image_size=image_size,
        patch_size=config.patch_size,
        channels=channels,
        classes=classes,
        final_norm=config.final_norm,
        generator=derived_generator(config.seed, "weights"),
    )
    if remedies := remedies_of(config):
        apply(model, *remedies)
    return model.double() if config.precision == "float64" else model


class ImageClassification:
    """Cross-entropy on labelled images; test loss and accuracy. Follows the protocol `Task`.

    With `evaluate_on` "validation" the last fifth of the training images is not trained on, and is looked at instead of
    the test images, which then nothing has seen.
    """

    unit = "images"

    def __init__(self, config: ImageConfig, data: LabelledImages):
        if config.evaluate_on == "validation":
            data = data.for_tuning()
        if config.batch_size > len(data.train_images):
            raise ValueError(f"expected batch_size of at most {len(data.train_images)}, got {config.batch_size}")
        if config.augment and data.train_images.shape[1] != 3:
            raise ValueError(f"augment is for colour images; {data.name} has none")
        self.config = config
        self.data = data
        self.units_per_step = config.batch_size
        self.steps_per_epoch = len(data.train_images) // config.batch_size

    def build(self) -> nn.Module:
        _, channels, _, size = self.data.train_images.shape
        return build_vit(self.config, image_size=size, channels=channels, classes=self.data.classes)

    def batch(self, step: int, share: Share, device: torch.device) -> ImageBatch:
        config, data = self.config, self.data
        indices = batch_indices(config.seed, step, len(data.train_images), config.batch_size)
        indices = indices[share.of(len(indices))]
        draw = derived_generator(config.seed, "augmentation", step, share.index) if config.augment else None
        return self.normalised(data.train_images[indices].to(device), draw), data.train_labels[indices].to(device)

    def loss(self, model: nn.Module, batch: ImageBatch, carry: Carry) -> tuple[Tensor, Carry]:
        images, labels = batch
        return F.cross_entropy(model(images), labels), None

    def evaluate(self, model: nn.Module, share: Share, device: torch.device) -> dict[str, float]:
        images, labels = (part[share.index :: share.count] for part in (self.data.test_images, self.data.test_labels))
        loss, right = 0.0, 0
        for some, classes in zip(images.split(_TEST_BATCH), labels.split(_TEST_BATCH), strict=True):
            scores = model(self.normalised(some.to(device))).double()
            classes = classes.to(device)
            loss += F.cross_entropy(scores, classes, reduction="sum").item()
            right += int((scores.argmax(dim=-1) == classes).sum())
        which = "test" if self.config.evaluate_on == "test" else "valid"
        return {f"{which}_loss": loss, f"{which}_accuracy": float(right), "count": float(len(labels))}

    def report(self, means: dict[str, float]) -> dict[str, float]:
        return means

    def describe(self) -> dict[str, Any]:
        return self.data.describe()

    def normalised(self, pixels: Tensor, augmented: torch.Generator | None = None) -> Tensor:
        """Bytes (batch, c, s, s) → channels of mean 0 and variance 1 over the training images; perhaps augmented."""
        images = pixels.to(torch.float64 if self.config.precision == "float64" else torch.float32) / self.data.white
        if augmented is not None:
            images = auto_augment(images, augmented)
        mean, std = (images.new_tensor(value).view(-1, 1, 1) for value in (self.data.mean, self.data.std))
        return (images - mean) / std
