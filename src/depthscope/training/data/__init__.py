"""Images and labels from files, checked."""

from __future__ import annotations

from depthscope.training.data.cifar10 import load_cifar10
from depthscope.training.data.digits import load_digits
from depthscope.training.data.labelled import LabelledImages

__all__ = ["LabelledImages", "load_cifar10", "load_digits"]
