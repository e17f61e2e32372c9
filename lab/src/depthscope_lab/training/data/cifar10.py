"""CIFAR-10 (Krizhevsky 2009): 60 000 images of 32 × 32 pixels, from its original files or a Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from depthscope_lab.training.data.cifar10_hub import read_dataset
from depthscope_lab.training.data.cifar10_pickle import read_pickle
from depthscope_lab.training.data.labelled import LabelledImages

HUB_NAME = "uoft-cs/cifar10"
PER_FILE, TRAINING, TEST, CLASSES = 10_000, 50_000, 10_000, 10
_PIXELS = 3 * 32 * 32
_TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
_TEST_FILE = "test_batch"

Part = tuple[np.ndarray, np.ndarray]  # images (count, 3072) as uint8, labels (count,)


def load_cifar10(
    source: str | None = None, *, allow_incomplete: bool = False, per_file: int = PER_FILE
) -> LabelledImages:
    """`source`: a folder `cifar-10-batches-bin` or `-py`, or `hf:` and the name or folder of a dataset.

    A folder without some of its files is refused, or used as far as it goes with `allow_incomplete`; a
    file that is there and not whole is always refused. `per_file`: images that a file has.
    """
    source = source or f"hf:{HUB_NAME}"
    note = ""
    if source.startswith("hf:"):
        name = source.removeprefix("hf:")
        train, test = read_dataset(name, "train"), read_dataset(name, "test")
        for part, (images, _), expected in (("train", train, 5 * per_file), ("test", test, per_file)):
            if len(images) != expected and not allow_incomplete:
                raise ValueError(
                    f"expected {expected} images in the {part} split of {name!r}, got {len(images)}; "
                    "--allow-incomplete uses what is there"
                )
    else:
        folder = Path(source)
        suffix, read = _format_of(folder, per_file)
        missing = [name + suffix for name in (*_TRAIN_FILES, _TEST_FILE) if not (folder / (name + suffix)).exists()]
        if missing and not allow_incomplete:
            raise ValueError(
                f"expected all of CIFAR-10 in {source!r}, missing: {', '.join(missing)}; "
                "--allow-incomplete uses what is there"
            )
        if missing:
            note = f"CIFAR-10 without {', '.join(missing)}"
        parts = [read(folder / (name + suffix)) for name in _TRAIN_FILES if name + suffix not in missing]
        if not parts or _TEST_FILE + suffix in missing:
            raise ValueError(f"expected at least one training file and {_TEST_FILE}{suffix} in {source!r}")
        train = np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
        test = read(folder / (_TEST_FILE + suffix))
    return LabelledImages(
        "cifar10",
        *_tensors(train),
        *_tensors(test),
        white=255,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        note=note,
    )


def _format_of(folder: Path, per_file: int) -> tuple[str, Callable[[Path], Part]]:
    """How the files' names end and what reads one."""
    if not folder.is_dir():
        raise ValueError(f"expected a folder with CIFAR-10, got {str(folder)!r}; or hf:NAME for a Hugging Face dataset")
    for suffix, reader in ((".bin", read_binary), ("", read_pickle)):
        if any((folder / (name + suffix)).is_file() for name in (*_TRAIN_FILES, _TEST_FILE)):
            return suffix, partial(_checked, reader, per_file)
    raise ValueError(
        f"expected data_batch_1.bin … or data_batch_1 … in {str(folder)!r}, found neither; is it "
        "cifar-10-batches-bin or cifar-10-batches-py, unpacked?"
    )


def read_binary(path: Path) -> Part:
    """One file of `cifar-10-batches-bin`: records of 1 byte for the class and 3 × 32 × 32 for the pixels."""
    content = np.fromfile(path, dtype=np.uint8)
    if content.size % (1 + _PIXELS):
        raise ValueError(f"{str(path)!r} is truncated: {content.size} bytes are no multiple of {1 + _PIXELS}")
    records = content.reshape(-1, 1 + _PIXELS)
    return records[:, 1:], records[:, 0]


def _checked(read: Callable[[Path], Part], per_file: int, path: Path) -> Part:
    images, labels = read(path)
    if len(images) != per_file:
        raise ValueError(f"expected {per_file} images in {str(path)!r}, got {len(images)}: truncated, or not CIFAR-10")
    if labels.size and labels.max() >= CLASSES:
        raise ValueError(f"expected classes 0 to 9 in {str(path)!r}, got {labels.max()}: corrupt, or not CIFAR-10")
    return images, labels


def _tensors(part: Part) -> tuple[Tensor, Tensor]:
    images, labels = part
    return (
        torch.from_numpy(np.array(images, dtype=np.uint8).reshape(-1, 3, 32, 32)),
        torch.from_numpy(labels.astype(np.int64)),
    )
