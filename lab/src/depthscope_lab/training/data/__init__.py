"""Images and labels from files, checked."""

from __future__ import annotations

from depthscope_lab.training.data.cifar10 import load_cifar10
from depthscope_lab.training.data.digits import load_digits
from depthscope_lab.training.data.labelled import LabelledImages

__all__ = ["LabelledImages", "load_cifar10", "load_digits"]
