"""From a configuration to its task: the data is loaded here."""

from __future__ import annotations

from dataclasses import replace

import torch

from depthscope.training.config import ImageConfig, TrainingConfig
from depthscope.training.data import LabelledImages, load_cifar10, load_digits
from depthscope.training.data.cifar10 import TEST, TRAINING
from depthscope.training.images import ImageClassification
from depthscope.training.task import Task


def make_task(config: TrainingConfig, data: str | None = None, *, allow_incomplete: bool = False) -> Task:
    """The task of a configuration. `data`: where its data is, if it does not come with a library."""
    if isinstance(config, ImageConfig):
        if config.dataset == "digits":
            if data is not None or allow_incomplete:
                raise ValueError(f"{config.recipe} brings its data (scikit-learn's digits); leave --data out")
            return ImageClassification(config, load_digits())
        return ImageClassification(config, load_cifar10(data, allow_incomplete=allow_incomplete))
    raise ValueError(f"no task is known for {type(config).__name__}")


def make_empty_task(config: TrainingConfig) -> Task:
    """The same without its data, on the meta device: for sizes and counts, with nothing loaded."""
    if isinstance(config, ImageConfig):
        cifar = config.dataset == "cifar10"
        shape, train, test = ((3, 32, 32), TRAINING, TEST) if cifar else ((1, 8, 8), 1437, 360)
        images = [torch.empty(count, *shape, dtype=torch.uint8, device="meta") for count in (train, test)]
        labels = [torch.empty(count, dtype=torch.int64, device="meta") for count in (train, test)]
        channels = (0.5,) * shape[0]
        empty = LabelledImages(
            config.dataset, images[0], labels[0], images[1], labels[1], white=1, mean=channels, std=channels
        )
        return ImageClassification(replace(config, augment=False), empty)  # which needs pixels
    raise ValueError(f"no task is known for {type(config).__name__}")
