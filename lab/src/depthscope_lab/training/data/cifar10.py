"""CIFAR-10 (Krizhevsky 2009) from its binary files: 60 000 images of 32 × 32 pixels, 10 000 in each of six files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from depthscope_lab.training.data.labelled import LabelledImages

PER_FILE, CLASSES = 10_000, 10
TRAINING, TEST = 5 * PER_FILE, PER_FILE
FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")  # the last one is for testing
_PIXELS = 3 * 32 * 32


def load_cifar10(source: str | None, *, per_file: int = PER_FILE) -> LabelledImages:
    """The folder `cifar-10-batches-bin`, unpacked. A file that is missing or not whole is refused, by its name.

    A file has `per_file` records, of 1 byte for the class and 3 × 32 × 32 for the pixels.
    """
    if source is None or not (folder := Path(source)).is_dir():
        found = "nothing" if source is None else repr(source)
        raise ValueError(
            f"expected a folder with CIFAR-10, got {found}: unpack cifar-10-binary.tar.gz of "
            "www.cs.toronto.edu/~kriz/cifar.html, and give --data cifar-10-batches-bin"
        )
    if missing := [name for name in FILES if not (folder / name).is_file()]:
        other = " (Python's pickles may run any code, and are not read)" if (folder / "data_batch_1").exists() else ""
        raise ValueError(
            f"expected CIFAR-10's binary version in {source!r}{other}; missing: {', '.join(missing)}; "
            "is it cifar-10-batches-bin, unpacked?"
        )
    images, labels = [], []
    for path in (folder / name for name in FILES):
        content = np.fromfile(path, dtype=np.uint8)
        if content.size != (expected := per_file * (1 + _PIXELS)):
            raise ValueError(f"expected {expected} bytes in {str(path)!r}, got {content.size}: truncated, or another")
        records = torch.from_numpy(content.reshape(per_file, 1 + _PIXELS))
        labels.append(records[:, 0].long())
        images.append(records[:, 1:].reshape(per_file, 3, 32, 32))
        if (greatest := int(labels[-1].max())) >= CLASSES:
            raise ValueError(f"expected classes 0 to 9 in {str(path)!r}, got {greatest}: corrupt, or not CIFAR-10")
    return LabelledImages(
        "cifar10",
        torch.cat(images[:-1]),
        torch.cat(labels[:-1]),
        images[-1],
        labels[-1],
        white=255,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
    )
