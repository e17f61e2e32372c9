"""The three tasks of Dong et al. 2021, Fig. 4: sorting, convex hull, memorisation; and what needs no attention.

Every token has a label of its own. Validation is a split of its own, which nothing here but the choice of a learning
rate has seen; memorising has none, and is tested on what was learnt, as its name says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from depthscope_lab.training.data.wikitext import load_manual

SPREAD = 3.3  # standard deviation of the shift of a whole set of points, as in the authors' generator
SIDE = 10.0  # of the square that the points are drawn from
BINS = 24  # per coordinate, for what a point's own place says


@dataclass(frozen=True)
class Examples:
    """inputs (count, n) of ids or (count, n, 2) of coordinates, labels (count, n)."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Data:
    train: Examples
    validation: Examples
    test: Examples
    classes: int
    vocabulary: int = 0  # 0: points, not ids


@dataclass(frozen=True)
class Size:
    """Numbers of sequences, and tokens in each; `classes` is the alphabet of sorting."""

    train: int
    validation: int
    test: int
    tokens: int
    classes: int = 2


def sorting(size: Size, seed: int) -> Data:
    """Uniform letters with repetition; the label at place i is the i-th of the sorted sequence."""
    generator = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        letters = torch.randint(size.classes, (count, size.tokens), generator=generator)
        return Examples(letters, letters.sort(dim=-1).values)

    train, validation, test = map(examples, (size.train, size.validation, size.test))
    return Data(train, validation, test, size.classes, size.classes)


def convex_hull(size: Size, seed: int) -> Data:
    """Uniform points in a square, shifted together by a Gaussian; the label says which are on their convex hull."""
    generator = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        points = SIDE * torch.rand(count, size.tokens, 2, generator=generator, dtype=torch.float64)
        points = points + SPREAD * torch.randn(count, 1, 2, generator=generator, dtype=torch.float64)
        return Examples(points.float(), on_hull(points).long())

    train, validation, test = map(examples, (size.train, size.validation, size.test))
    return Data(train, validation, test, 2)


def on_hull(points: Tensor) -> Tensor:
    """Which of the points (…, n, 2) are corners of their convex hull: (…, n), boolean.

    A point is one if all others lie within an angle of less than π, seen from it: if the largest gap between their
    directions, one after the other around it, is more than π. Fewer than four points in general position are all on it.
    """
    n = points.shape[-2]
    if n < 3:
        return torch.ones(points.shape[:-1], dtype=torch.bool)
    ways = points.unsqueeze(-3) - points.unsqueeze(-2)  # (…, i, j, 2): from i to j
    others = ~torch.eye(n, dtype=torch.bool)
    angles = torch.atan2(ways[..., 1], ways[..., 0])[..., others].unflatten(-1, (n, n - 1)).sort(dim=-1).values
    around = torch.cat([angles, angles[..., :1] + 2 * math.pi], dim=-1)
    return around.diff(dim=-1).amax(dim=-1) > math.pi


def memorisation(size: Size, seed: int) -> Data:
    """Consecutive pieces of Python's manual, and for every word of every piece a random bit to be remembered."""
    words = load_manual()
    stream = torch.from_numpy(words.train[: size.train * size.tokens].astype("int64"))
    if len(stream) < size.train * size.tokens:
        raise ValueError(f"expected {size.train} × {size.tokens} words in Python's manual, got {len(stream)}")
    labels = torch.randint(2, (size.train, size.tokens), generator=torch.Generator().manual_seed(seed))
    whole = Examples(stream.unflatten(0, (size.train, size.tokens)), labels)
    part = Examples(whole.inputs[: size.test], whole.labels[: size.test])
    return Data(whole, part, part, 2, len(words.vocabulary))


TASKS: dict[str, Callable[[Size, int], Data]] = {
    "sorting": sorting,
    "convex hull": convex_hull,
    "memorisation": memorisation,
}


def baselines(task: str, data: Data) -> dict[str, float]:
    """Accuracies on the test set that need no attention, learnt from the training set.

    `guess`: 1/classes. `majority`: the most frequent label. `token alone`: the most frequent label for what a token
    without attention knows of itself: its letter and place, its bin in the plane, its word; no path of length 0 can be
    expected to do better. `ceiling`: as good as the model's inputs allow: without positions, equal words of a piece
    look alike to every model, and their labels do not.
    """
    train, test = data.train, data.test
    majority = int(train.labels.flatten().bincount().argmax())
    known = {"guess": 1 / data.classes, "majority": float((test.labels == majority).double().mean())}
    known["token alone"] = table_accuracy(_own(task, train), train.labels, _own(task, test), test.labels, majority)
    if task == "memorisation":
        piece = torch.arange(len(test))[:, None] * data.vocabulary + test.inputs
        known["ceiling"] = table_accuracy(piece, test.labels, piece, test.labels, majority)
    else:
        known["ceiling"] = 1.0
    return known


def table_accuracy(keys: Tensor, labels: Tensor, test_keys: Tensor, test_labels: Tensor, otherwise: int) -> float:
    """Of a table that answers with the commonest label of a key, and with `otherwise` where a key is new."""
    classes = int(max(labels.max(), test_labels.max())) + 1
    names, places = keys.flatten().unique(return_inverse=True)
    counts = torch.zeros(len(names), classes, dtype=torch.long)
    counts.index_put_((places, labels.flatten()), torch.ones_like(places), accumulate=True)
    asked = test_keys.flatten()
    found = torch.searchsorted(names, asked).clamp(max=len(names) - 1)
    answers = torch.where(names[found] == asked, counts.argmax(dim=1)[found], otherwise)
    return float((answers == test_labels.flatten()).double().mean())


def _own(task: str, examples: Examples) -> Tensor:
    """What a token knows of itself, as one number (count, n)."""
    if task == "sorting":
        places = torch.arange(examples.inputs.shape[1])
        return examples.inputs * len(places) + places
    if task == "convex hull":
        low, high = -3 * SPREAD, SIDE + 3 * SPREAD
        bins = ((examples.inputs - low) / (high - low) * BINS).long().clamp(0, BINS - 1)
        return bins[..., 0] * BINS + bins[..., 1]
    return examples.inputs
