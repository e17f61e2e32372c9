"""A trunk of several streams (hyper-connections), measured stream by stream.

A stream of a sequence is measured as a sequence of its own, and the number of a sequence is the mean over its streams.
What a branch reads has no streams. Beside it, how alike the streams of one token are: copies of one another are 1.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from depthscope.probing.readings import Reading

ALIKE = "stream_similarity"
BY_STREAM = ("token_similarity", "direction_similarity", "frobenius_norm")  # in the metadata, for each stream


def stream_similarity(tokens: Tensor, real: Tensor | None) -> Tensor:
    """The cosine between two streams of a token, mean over pairs and over real tokens: (batch, n, s, d) → (batch).

    Σ_{i≠j} cos = ‖Σ_i u_i‖² − s for unit u_i. nan of sequences without real tokens.
    """
    streams = tokens.shape[2]
    total = F.normalize(tokens.double(), dim=-1).sum(dim=2).square().sum(dim=-1)  # (batch, n)
    alike = (total - streams) / (streams * (streams - 1))
    return alike.mean(dim=-1) if real is None else torch.where(real, alike, 0.0).sum(dim=-1) / real.sum(dim=-1)


class Streams:
    """The numbers of each stream, while those of sequences are made of them."""

    def __init__(self) -> None:
        self.number = 1
        self._by_stream: dict[str, dict[int, list[Any]]] = {}  # measure → block → batch → one per stream

    def of_sequences(self, reading: Reading) -> Reading:
        """The mean over streams; of what has none the number itself."""
        if reading.first_sample < 0 or reading.head >= 0 or reading.measure == ALIKE:
            return reading
        runs = [reading.values[i : i + self.number] for i in range(0, len(reading.values), self.number)]
        if reading.station == "output" and reading.measure in BY_STREAM:
            kept = self._by_stream.setdefault(reading.measure, defaultdict(list))
            kept[reading.block].append(_mean(np.array(runs), axis=0))
        known = [[value for value in run if not math.isnan(value)] for run in runs]
        return reading._replace(values=[math.fsum(run) / len(run) if run else math.nan for run in known])

    @property
    def summary(self) -> dict[str, Any]:
        """For the metadata: how many there are, and some measures of each, by block from 0, mean over batches."""
        of_each = {
            name: [_mean(np.array(blocks[block]), axis=0).tolist() for block in sorted(blocks)]
            for name, blocks in self._by_stream.items()
        }
        return {"number": self.number, **of_each}

    @property
    def note(self) -> str:
        """What a reader of the profile must know."""
        return (
            f"{self.number} streams (hyper-connections): numbers of the trunk are means over them; "
            f"metadata['streams'] has each, and {ALIKE} says how alike those of a token are (1: copies of one another)"
        )


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Without those that are nan; of these alone it is nan, without a warning."""
    return torch.from_numpy(values).double().nanmean(dim=axis).numpy()
