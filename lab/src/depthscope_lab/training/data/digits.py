"""scikit-learn's handwritten digits: 1797 images of 8 × 8 pixels that come with the library."""

from __future__ import annotations

from functools import cache

import torch

from depthscope_lab.extras import require
from depthscope_lab.training.data.labelled import LabelledImages

TRAINING = 1437  # four fifths of 1797; the other 360 are for testing


@cache
def load_digits() -> LabelledImages:
    """Always the same split: a random order of its own (neighbours in the file are by the same writer). Read once."""
    found = require("sklearn.datasets").load_digits()
    images = torch.as_tensor(found.images).to(torch.uint8).unsqueeze(1)  # (1797, 1, 8, 8), values 0 to 16
    labels = torch.as_tensor(found.target).long()
    if len(images) != 1797:
        raise ValueError(f"expected scikit-learn's digits to be 1797 images, got {len(images)}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAINING], order[TRAINING:]
    return LabelledImages(
        "digits",
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        white=16,
        mean=(0.305,),
        std=(0.376,),
    )
