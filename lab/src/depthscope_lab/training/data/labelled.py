"""Labelled images as they are kept in memory: bytes, not floats."""

from __future__ import annotations

from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from torch import Tensor


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
    note: str = ""  # what a user should know, e.g. that files are missing

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
        return {
            "name": self.name,
            "training images": len(self.train_images),
            "test images": len(self.test_images),
            "fingerprint": digest.hexdigest()[:16],
        }
