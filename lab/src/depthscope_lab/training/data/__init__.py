"""Images, letters and words from files, checked."""

from depthscope_lab.training.data.cifar10 import load_cifar10
from depthscope_lab.training.data.labelled import LabelledImages, load_digits

__all__ = ["LabelledImages", "load_cifar10", "load_digits"]
