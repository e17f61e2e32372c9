"""CIFAR-10 as a Hugging Face dataset: by name, or a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from depthscope_lab.extras import require

_IMAGE_COLUMNS, _LABEL_COLUMNS = ("img", "image"), ("label", "labels")
_SIZE = (32, 32)


def read_dataset(name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, 3072) as uint8, channel first, and labels (count,) of one split."""
    datasets = require("datasets")
    try:
        if (Path(name) / "dataset_dict.json").is_file():  # what `save_to_disk` wrote
            found = datasets.load_from_disk(name)[split]
        else:
            found = datasets.load_dataset(name, split=split)
    except Exception as error:  # its own, and those of every file system and network below it
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"could not load the {split} split of the dataset {name!r}: {reason}; "
            "with CIFAR-10 on disk, give its folder: --data DIR"
        ) from None
    image_column, label_column = _column(found, name, _IMAGE_COLUMNS), _column(found, name, _LABEL_COLUMNS)
    try:
        images = np.stack([_pixels(image) for image in found[image_column]])
        labels = np.asarray(found[label_column], dtype=np.int64)
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"expected 32 × 32 images and classes 0 to 9 in {name!r}: {error}") from None
    if labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"expected classes 0 to 9 in {name!r}, got {labels.min()} to {labels.max()}")
    return images, labels


def _column(found: Any, name: str, wanted: tuple[str, ...]) -> str:
    for column in wanted:
        if column in found.column_names:
            return column
    raise ValueError(f"expected a column {' or '.join(wanted)} in {name!r}, got {', '.join(found.column_names)}")


def _pixels(image: Any) -> np.ndarray:
    if image.size != _SIZE:
        raise ValueError(f"got an image of {image.size[0]} × {image.size[1]} pixels")
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1).reshape(-1)
