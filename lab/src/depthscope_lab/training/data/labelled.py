"""Labelled images as they are kept in memory (bytes, not floats), and scikit-learn's digits as such."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from depthscope_lab.extras import require

DIGITS_TRAINING, DIGITS_TEST = 1437, 360  # four fifths, and the rest


@dataclass(frozen=True)
class LabelledImages:
    """Training and test images (count, channels, s, s) as uint8 and their classes (count,) as int64."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    white: int  # the value of a white pixel
    mean: tuple[float, ...]  # of the training images in units of white, by channel
    std: tuple[float, ...]
    classes: int = 10

    def for_tuning(self, share: float = 0.2) -> LabelledImages:
        """Training images only: the last `share` of them stands in for the test images, which a choice may not see."""
        kept = len(self.train_images) - round(share * len(self.train_images))
        return replace(
            self,
            name=f"{self.name}, for tuning",
            train_images=self.train_images[:kept],
            train_labels=self.train_labels[:kept],
            test_images=self.train_images[kept:],
            test_labels=self.train_labels[kept:],
        )

    def describe(self) -> dict[str, Any]:
        """Name, counts and a fingerprint of every pixel and label."""
        digest = sha256()
        for tensor in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(repr(tuple(tensor.shape)).encode())
            digest.update(tensor.contiguous().numpy().data)
        counts = {"training images": len(self.train_images), "test images": len(self.test_images)}
        return {"name": self.name, **counts, "fingerprint": digest.hexdigest()[:16]}


@cache
def load_digits() -> LabelledImages:
    """scikit-learn's handwritten digits: 1797 images of 8 × 8 pixels that come with the library.

    Always the same split: a random order of its own, as neighbours in the file are by the same writer. Read once.
    """
    found = require("sklearn.datasets").load_digits()
    images = torch.as_tensor(found.images).to(torch.uint8).unsqueeze(1)  # (1797, 1, 8, 8), values 0 to 16
    labels = torch.as_tensor(found.target).long()
    if len(images) != DIGITS_TRAINING + DIGITS_TEST:
        raise ValueError(f"expected scikit-learn's digits to be 1797 images, got {len(images)}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:DIGITS_TRAINING], order[DIGITS_TRAINING:]
    return LabelledImages(
        "digits", images[train], labels[train], images[test], labels[test], white=16, mean=(0.305,), std=(0.376,)
    )
